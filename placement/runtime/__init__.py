"""Running a model the way a placement says: in one process (`threads`) or in one per device (`ranks`).

The way through the modules: `functional` makes a captured program free of writes in place; `routines` cuts it into
one routine per device, with the sends and receipts between them; `links` carry tensors; `module` is what a user gets.
"""
