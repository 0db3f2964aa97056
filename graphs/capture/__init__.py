"""From a PyTorch model to an `OpGraph`: `capture`, and `from_exported_program` for what torch.export made elsewhere.

The way through the modules: `api` borrows the model (`fake`) and gets a `trace` of it, by `export` or `record`;
`lower` turns that into `drafts` with their `costs` and `optimizers`; `emit` makes the graph. `modules` is the
coarser way, and `failure` words the error where tracing fails.
"""

from graphs.capture.api import capture, capture_program, example_inputs, from_exported_program
from graphs.capture.program import Program

__all__ = ["Program", "capture", "capture_program", "example_inputs", "from_exported_program"]
