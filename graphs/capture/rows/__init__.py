"""Split rows at capture: for every op of a graph the ways in which it may be split along one axis of a mesh.

`rules` and `layers` say in `letters` what may be split of one call, `dtensor` where they have nothing to say; `memory`
finds the letters in the tensors that a call's views belong to; `naming` follows them through the graph; `assembly`
writes the rows.
"""

from graphs.capture.rows.assembly import add_rows

__all__ = ["add_rows"]
