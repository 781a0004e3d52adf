"""Read the checkpoints of other programs, and merge them and their Fisher files."""
