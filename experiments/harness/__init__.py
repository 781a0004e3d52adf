"""What all commands share, once: read downwards, a module uses only those above it.

commands (options read, written, refused), records (the files of a run), tables, figures, config,
methods, tasks, progress, memory, one_round, checkpoints, rounds.
"""
