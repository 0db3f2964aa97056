"""Running a model the way a placement or strategy says.

The way of a strategy, room by room: `program` makes a captured step free of writes in place, `planning` says which
part of each tensor every rank has and wants, `writing` writes the code of one rank from that, and `modules` holds what
`placement.apply` returns (`application` checks the answer and picks one of the `backends`). A rank's code runs calls
on parts (`calls`), collectives (`exchanging`) and transfers (`transport`) between processes (`ranks`); its parameters
are `states`, saved by `storing`. `checking` runs all this on small sizes before a strategy is advised.
"""
