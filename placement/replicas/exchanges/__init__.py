"""What replicas send each other, and when: one file for each exchange."""
