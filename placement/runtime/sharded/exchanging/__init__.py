"""What ranks exchange in one collective, and how that is carried out between processes or threads."""
