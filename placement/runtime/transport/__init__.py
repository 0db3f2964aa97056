"""Carrying one tensor from process to process: in shared memory, by gloo, or by NCCL from GPU to GPU."""
