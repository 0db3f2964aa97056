"""The code of one rank, written from what all ranks do."""
