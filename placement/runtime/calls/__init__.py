"""A captured call on the parts that a rank has: `local_calls.local_call`, with one file for each kind of operator."""
