"""Running a model the way a placement says.

`application` checks the placement and picks one of the `backends`. `program` makes code of a captured step: one routine
for each device, with the transfers between them. That code runs in one process (`in_process`) or in one process for
each device (`ranks`), whose tensors go by `transport`; there a placement is a strategy whose stages are devices
(`sharded`).
"""
