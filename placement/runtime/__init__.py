"""Running a model the way a placement or strategy says.

A strategy runs on torch's engine: `setups` says what it means for the modules of one model, and `torch_runner` makes
of the model what one rank computes, by the parts of torch. A placement of ops runs captured code: `program` makes a
captured step free of writes in place and writes the code of one device. `modules` holds what `placement.apply`
returns, and `ranks` the processes under it; `application` checks the answer and picks one of the `backends`.
`checking` runs a strategy on a small model before it is advised.
"""
