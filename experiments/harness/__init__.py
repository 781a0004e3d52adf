"""Modules that at least two studies use. Each module imports only modules above it.

names, program_cache, commands: options and process of a command. tables, papers, records, figures:
files of a run. config, limits, methods, votes, tasks: data, networks and methods. checkpoints,
steps, after_merge, one_round, accuracies, memory, progress: one round of merging. forecast,
grid_runs, grids: many rounds of merging. reference, trained_clients: clients of a file. studies:
measurements and reports.
"""
