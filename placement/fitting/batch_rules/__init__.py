"""How a mean gradient becomes an update, and how that depends on the size of the batch: one file for each rule."""
