"""Modules that at least two studies use. Each module imports only modules above it.

names, imported, choices, program_cache, option_groups, hosts, commands: options and processes of a
command. tables, papers, records, folders, figures: files of a run. config, limits, methods, votes,
tasks: data, networks and methods. checkpoints, steps, kept_clients, after_merge, one_round,
accuracies, memory, progress: one round of merging. forecast, grids, grid_runs: many rounds of
merging. reference, trained_clients: clients of a file. studies: measurements and reports.
"""
