"""Carriers of one tensor from process to process: shared memory, gloo, and NCCL from GPU to GPU."""
