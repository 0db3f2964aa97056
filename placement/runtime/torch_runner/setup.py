"""`Setup`: the constants with which the torch runner runs one model under one strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, eq=False)
class Setup:
    """All that a strategy says to a model's modules. What is empty or 0 is not there.

    Attributes:
        mesh: sizes of the axes that ranks are numbered by, the last one fastest.
        is_cut: no device keeps all weights, so that they are to be cut before they are moved there.
        batch: samples of the whole batch; 0 where nothing is cut by samples.
        replicas: of the model, along `replica_axes`: groups of replicas first.
        micro_batches: of each replica.
        samples: of each micro-batch of each replica in a row, where these are not as many.
        own_samples: modules of which replicas compute their own samples, where other code reads the whole batch.
        cuts_batch, is_weighed: whether a rank computes parts of the batch, and weighs their losses.
        labels: how means over labels become those of the whole batch: ``"each"``, ``"one"`` or ``"equal"``.
        label_axes: along which parts of the batch, and stages, are; label_losses: how many such means a part has.
        zero: level of ZeRO, 0 to 3.
        is_ddp: replicas are DistributedDataParallel's, with buckets of `bucket_mb`.
        has_unused: the step leaves some parameters without a gradient.
        is_sharded: replicas are fully_shard's, over `sharding_axes`; it reduces gradients in each micro-batch, or with
            `reduces_once` those of all.
        layers: modules whose parameters are gathered together.
        has_policy: parameters are computed with in format `activation` and reduced in format `gradient`.
        offloads_parameters, offloads_optimizer: what the host keeps.
        updates_parts: the optimizer works on plain tensors that parameters have parts in.
        styles: pattern of module paths -> how its weights are cut along `weight_axis`.
        cuts_loss: a cross-entropy reads scores of which each rank has those of some classes.
        sequence: modules between which activations are cut along the sequence.
        gathers_sequence: all that reads what a norm in these modules writes needs it whole.
        tied_weights: pairs of names of parameters that are one and are cut.
        has_blocks: some weights are cut in blocks.
        cuts_replicas: weights are cut along the replicas' axis; pads: and replicas have unlike numbers of samples.
        computed_again: modules that the backward pass computes a second time.
        kept: patterns of kinds of ops, and of modules, that are kept all the same; watched: these of modules.
        cores: modules -> numbers of ops of `core_kinds` around the parts of them that are computed again.
        splits_backward: backward passes for inputs and for weights are apart.
        on_host: modules that save on the host what the backward pass needs; on_device: modules inside that do not.
        synchronises: batch norms take statistics over all replicas.
        stages: modules of each stage, the first of which gets what the stage before hands over.
        rank_of_stage: along axis ``pp``.
        read_outside: parameters that the model reads outside of their module.
        loose: parameters outside of all modules of stages, and the stage that trains each.
        returns: module of another stage -> function from the tensor that goes on to all that the module returns.
        begins: stage -> module inside of which it begins.
        pieces: stage -> module -> function that stands for its forward pass there.
        tied: parameters in several stages: all their names, the shape of a rank's largest part, and the dtype.
        schedule: class of torch.distributed.pipelining; has_one_stage: it takes one stage a rank.
        order: of a schedule that torch has no class for: a row of CSV for each rank.
        reduces_itself: replicas of stages have no wrapper.
        context: parts of each sequence; so many replicas in a row along axis ``dp`` have the same samples.
        context_variant: ``"gather"`` of keys and values, ``"ulysses"``: all-to-all by heads, or ``"ring"``.
        context_modules: with attention, with positions, or that read a table.
        sequence_inputs: of the model, with the dimension that is the sequence.
        tables: parameters and buffers with a row for each word: the module that reads one, its name from there, and
            the dimension.
        shifts_labels: the model compares each word with the label behind it.
        adds_positions: the model gets the positions of its words.
        experts: parts of the experts of each layer; so many replicas in a row along axis ``dp`` have all.
        expert_modules: with stacked weights, and whether they get tokens, experts that these ask, and weights.
        shards_experts: fully_shard cuts experts among the ranks with the same ones.
    """

    mesh: Mapping[str, int]
    is_cut: bool = False
    batch: int = 0
    replicas: int = 1
    replica_axes: tuple[str, ...] = ()
    micro_batches: int = 1
    samples: tuple[int, ...] = ()
    own_samples: tuple[str, ...] = ()
    cuts_batch: bool = False
    is_weighed: bool = False
    labels: str | None = None
    label_axes: tuple[str, ...] = ()
    label_losses: int = 1
    zero: int = 0
    is_ddp: bool = False
    bucket_mb: float = 25.0
    has_unused: bool = False
    is_sharded: bool = False
    reduces_once: bool = False
    sharding_axes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    has_policy: bool = False
    activation: str = ""
    gradient: str = ""
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    updates_parts: bool = False
    styles: Mapping[str, ParallelStyle] = field(default_factory=dict)
    weight_axis: str = "tp"
    cuts_loss: bool = False
    sequence: tuple[str, ...] = ()
    gathers_sequence: bool = False
    tied_weights: tuple[tuple[str, str], ...] = ()
    has_blocks: bool = False
    cuts_replicas: bool = False
    pads: bool = False
    computed_again: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    watched: tuple[str, ...] = ()
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    core_kinds: tuple[str, ...] = ()
    splits_backward: bool = False
    on_host: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()
    synchronises: bool = False
    stages: tuple[tuple[str, ...], ...] = ()
    rank_of_stage: tuple[int, ...] = ()
    read_outside: frozenset[str] = frozenset()
    loose: Mapping[str, int] = field(default_factory=dict)
    returns: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    begins: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[int, Mapping[str, Callable[..., Any]]] = field(default_factory=dict)
    tied: tuple[tuple[frozenset[str], tuple[int, ...], str], ...] = ()
    schedule: str = ""
    has_one_stage: bool = False
    order: str = ""
    reduces_itself: bool = False
    context: int = 1
    context_variant: str = ""
    context_modules: tuple[str, ...] = ()
    sequence_inputs: Mapping[str, int] = field(default_factory=dict)
    tables: tuple[tuple[str, str, int], ...] = ()
    shifts_labels: bool = False
    adds_positions: bool = False
    experts: int = 1
    expert_modules: Mapping[str, bool] = field(default_factory=dict)
    shards_experts: bool = False
