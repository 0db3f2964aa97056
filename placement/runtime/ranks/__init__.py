"""One process for each device: starting them, watching them, their end of transfers and files."""
