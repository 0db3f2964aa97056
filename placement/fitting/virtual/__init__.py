"""Replicas in virtual time: a simulated cluster decides who reads which version when; gradients are real."""
