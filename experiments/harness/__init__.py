"""Modules that at least two studies use. Each module imports only modules above it.

names, imported, program_cache, hosts, tables, records, decoded, choices, option_groups, commands:
options, processes and data of a command. papers, folders, figures, drawings: files of a run.
config, titles, limits, methods, votes, tasks: data, networks and methods. checkpoints, steps,
kept_clients, after_merge, one_round, accuracies, memory, progress: one round of merging. forecast,
grids, grid_runs: many rounds of merging. reference, trained_clients: clients of a file. studies:
measurements and reports.
"""
