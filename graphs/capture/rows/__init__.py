"""Split rows at capture: for every op of a graph the ways in which it may be split along one axis of a mesh.

Rules of operators (`graphs.ops`) say in letters what may be split of one call; `dispatch` adds what holds for places of
tokens and entries counted out; `naming` finds the letters in the tensors that a call's views belong to and follows them
through the graph; `assembly` writes the rows, by DTensor's rules where there is none of our own.
"""

from graphs.capture.rows.assembly import add_rows

__all__ = ["add_rows"]
