"""Write and read uploads of clients, and what describes, checks and merges their values."""
