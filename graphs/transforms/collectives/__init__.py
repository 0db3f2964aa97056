"""Collectives spelt out: which algorithm, as which ops and point-to-point tensors, and gradients in buckets."""

from graphs.transforms.collectives.bucketing import bucketed, with_fused_updates
from graphs.transforms.collectives.expansion import reduce
from graphs.transforms.collectives.rounds import ALGORITHMS, KINDS, carried_out_by
from graphs.transforms.collectives.template import Template, template

__all__ = ["ALGORITHMS", "KINDS", "Template", "bucketed", "carried_out_by", "reduce", "template", "with_fused_updates"]
