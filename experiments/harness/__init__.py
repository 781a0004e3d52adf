"""What all commands share, once. Read downwards: a module uses only those above it.

names, commands: options read, written again and refused. tables, records, points, figures: files of
a run. config, limits, methods, votes, tasks: what is learned, by whom and how. checkpoints, steps,
later, one_round, accuracies, memory, together, progress: one round of merging. forecast, grid_runs:
many of them. grids, niid, fedfisher, reference, knee, compression, secure, private, comparators,
gan, inversion, attack: tables and pictures. rounds, curves: rounds. domains, personal, worlds:
clients with models of their own.
"""
