"""The commands, one file each: a frozen record of its options, and the function that takes it."""
