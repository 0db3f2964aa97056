"""Can a strategy be carried out, and do its parts compute what the whole does? Before it is advised."""
