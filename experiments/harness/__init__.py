"""What at least two studies use. Read downwards: a module uses only those above it.

names, commands: options read, written again and refused. tables, records, measurements, figures:
files of a run. config, limits, methods, votes, tasks: what is learned, by whom and how.
checkpoints, steps, after_merge, one_round, accuracies, memory, progress: one round of merging.
forecast, grid_runs, grids: many of them. reference, trained_clients: clients of a file.
"""
