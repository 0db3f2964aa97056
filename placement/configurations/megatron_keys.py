"""Flags of Megatron-LM, and what is done with each."""

from __future__ import annotations

from placement.configurations.configuration import Format, Key, inert, inert_keys, only, read, refused, words
from placement.configurations.shell import SCRIPT

PROCESSES, NODES = "--nproc-per-node", "--nnodes"
TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, SP, VPP = "--expert-model-parallel-size", "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank"
DEEPEP = "--moe-enable-deepep"
DISPATCHER = "--moe-token-dispatcher-type"
ETP, MOMENTUM, FLOAT8_FORMAT = "--expert-tensor-parallel-size", "--sgd-momentum", "--fp8-format"
LAYERS_EACH, MICRO, BATCH = "--num-layers-per-virtual-pipeline-stage", "--micro-batch-size", "--global-batch-size"
GRANULARITY, METHOD, COUNT = (f"--recompute-{name}" for name in ("granularity", "method", "num-layers"))
FSDP2, FSDP, STRATEGY = "--use-torch-fsdp2", "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
EMBEDDING_COUNTS, LOSS_COUNTS = (f"--account-for-{name}-in-pipeline-split" for name in ("embedding", "loss"))
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
WAYS = {"p2p": "ring", "all_gather": "", "a2a": "ulysses"}
SIZES = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups"),
    *("--kv-channels", "--num-experts"),
)
LAUNCHER = (PROCESSES, NODES, "--node-rank", "--master-", "--rdzv-", "--max-restarts", "--standalone", "--tee")
_WIDE = "the optimizer keeps float32"
_NO_FLOAT4 = "no graphs have the casts of 4 bit"
_OWN_SPLIT = "stages of one's own lengths are not read"
_FLAGS = ("--bf16", "--fp16", SP, FSDP2, FSDP, EMBEDDING_COUNTS, LOSS_COUNTS)

KEYS: dict[str, Key] = {
    **{name: read(bool, False, field="is_float16" if name == "--fp16" else "") for name in _FLAGS},
    PROCESSES: read(int),
    NODES: read(int, 1),
    TP: read(int, 1, field="tensor"),
    PP: read(int, 1, field="stages"),
    CP: read(int, 1, field="context"),
    EP: read(int, 1, field="experts"),
    ETP: read(int),
    "--cp-comm-type": read(str, "p2p", *WAYS),
    "--hierarchical-context-parallel-sizes": refused("context parallelism has one way"),
    LAYERS_EACH: read(int),
    VPP: read(int, 1),
    "--pipeline-model-parallel-layout": refused(_OWN_SPLIT),
    "--decoder-first-pipeline-num-layers": refused(_OWN_SPLIT),
    "--decoder-last-pipeline-num-layers": refused(_OWN_SPLIT),
    "--pipeline-model-parallel-split-rank": refused(_OWN_SPLIT),
    MICRO: read(int, field="micro_batch"),
    BATCH: read(int, field="batch"),
    "--rampup-batch-size": inert,
    "--seq-length": read(int, field="sequence"),
    **{name: read(int) for name in SIZES},
    "--grad-reduce-in-bf16": read(bool, False),
    "--use-distributed-optimizer": read(bool, False),
    "--use-custom-fsdp": refused("it is --use-megatron-fsdp now"),
    STRATEGY: read(str, "no_shard", *STRATEGIES),
    "--num-distributed-optimizer-instances": only(1, why="the optimizer is cut over all replicas"),
    "--overlap-grad-reduce": read(bool, False, field="overlaps"),
    "--overlap-param-gather": inert,
    "--overlap-param-gather-with-optimizer-step": inert,
    "--align-*": inert,
    "--delay-wgrad-compute": refused("gradients of weights are not put off"),
    "--ddp-bucket-size": read(int),
    "--ddp-num-buckets": refused("buckets have a size"),
    "--ddp-*": inert,
    "--tp-comm-overlap": read(bool, False),
    "--tp-comm-*": inert,
    "--recompute-activations": read(bool, False),
    GRANULARITY: read(str, None, "full", "selective"),
    METHOD: read(str, None, "uniform", "block"),
    COUNT: read(int, 1),
    "--recompute-modules": only("core_attn", why="selective recomputation is that of the core of attention"),
    "--distribute-saved-activations": only(False, why="inputs of layers are whole on each device"),
    "--fine-grained-activation-offloading": refused("parts of layers on hosts are not read"),
    "--cpu-offloading": refused("layers on hosts are not read"),
    "--cpu-offloading-num-layers": refused("layers on hosts are not read"),
    "--optimizer-cpu-offload": read(bool, False),
    "--optimizer-offload-fraction": only(1.0, 1, why="all of the optimizer is on the host"),
    "--overlap-cpu-optimizer-d2h-h2d": inert,
    "--use-precision-aware-optimizer": inert,
    **{f"--{name}-dtype": only("fp32", why=_WIDE) for name in ("main-grads", "main-params", "exp-avg", "exp-avg-sq")},
    "--optimizer": read(str, "adam", "adam", "sgd"),
    MOMENTUM: read(float, 0.9),
    "--transformer-impl": only("transformer_engine", why="kernels are those of Transformer Engine"),
    "--attention-backend": only("auto", "flash", "fused", why="scores of attention are not kept"),
    FLOAT8_FORMAT: read(str, None, "e4m3", "hybrid"),
    **inert_keys("margin interval amax-history-len amax-compute-algo", before="--fp8-"),
    "--fp8-recipe": only("delayed", "tensorwise", why="other scales are of blocks, whose kernels have no rates"),
    "--fp8-param-gather": only(False, why="products alone are in 8 bit"),
    "--fp8-*": refused("products alone are in 8 bit"),
    "--fp4-*": refused(_NO_FLOAT4),
    "--external-cuda-graph": refused("launches of CUDA graphs are not modelled"),
    "--enable-cuda-graph": refused("launches of CUDA graphs are not modelled"),
    "--cuda-graph-*": refused("launches of CUDA graphs are not modelled"),
    "--mtp-num-layers": refused("heads for several words are another model"),
    "--hybrid-*": refused("hybrid models are other models"),
    DISPATCHER: words("once_a_host", "alltoall", {"alltoall": False, "flex": True}),
    DEEPEP: read(bool, False),
    "--moe-pad-expert-input-to-capacity": inert,
    "--moe-*": inert,
    "--overlap-moe-expert-parallel-comm": refused("all-to-alls are not hidden behind another micro-batch"),
    "--num-dataset-builder-threads": inert,
    SCRIPT: inert,
}
# The model, whose sizes the graph has.
_OF_THE_MODEL = """
    --max-position-embeddings --position-embedding-type --rotary-* --use-rotary-* --rope-* --normalization
    --norm-epsilon --swiglu --squared-relu --group-query-attention --untie-embeddings-and-output-weights
    --attention-dropout --hidden-dropout --init-method-* --add-qkv-bias --disable-bias-linear --qk-layernorm
    --apply-layernorm-1p --no-position-* --make-vocab-size-divisible-by --vocab-* --multi-latent-attention
    --q-lora-rank --v-head-dim --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
    --apply-query-key-layer-scaling --apply-residual-connection-post-layernorm --attention-softmax-in-fp32
    --no-rope-* --mscale* --use-rope-scaling
"""
# Training, data and files.
_OF_TRAINING = """
    --lr* --min-lr --override-opt* --use-checkpoint-opt* --weight-decay* --clip-grad --adam-*
    --start-weight-decay --end-weight-decay --sgd-* --train-* --eval-* --exit-* --seed --data-* --split
    --mock-data --valid-* --test-* --per-split-* --tokenizer-* --merge-* --reset-* --eod-*
    --create-attention-mask-in-dataloader --no-create-* --num-workers --mmap* --no-mmap-* --dataloader-type
    --save* --load* --no-load-* --no-save-* --finetune --pretrained-checkpoint --ckpt-* --dist-ckpt-*
    --use-dist-ckpt* --async-save --async-* --auto-detect-ckpt-format --use-checkpoint-args
    --exit-on-missing-checkpoint --log-* --tensorboard-* --wandb-* --timing-* --profile* --use-pytorch-profiler
    --record-memory-* --one-logger-* --enable-one-logger --app-tag-* --memory-snapshot-path --skip-train
    --decoupled-lr --decoupled-min-lr --tiktoken-* --logging-level --no-log-* --barrier-with-L1-time
    --adlr-autoresume* --non-persistent-* --inference-*
"""
# Processes and kernels.
_OF_PROCESSES = """
    --distributed-* --master-* --rdzv-* --node-rank --max-restarts --standalone --tee --redirects --role
    --local-ranks-filter --nccl-* --use-tp-pp-dp-mapping --no-async-* --manual-gc* --lazy-mpu-init
    --use-cpu-initialization --no-initialization --deterministic-mode --use-mcore-models --use-flash-attn
    --use-ring-exchange-p2p --no-masked-softmax-fusion --no-bias-* --no-gradient-accumulation-fusion
    --no-persist-layer-norm --cross-entropy-* --accumulate-allreduce-grads-in-fp32 --loss-scale*
    --initial-loss-scale --min-loss-scale --hysteresis --fp32-residual-connection --overlap-p2p-communication*
    --no-overlap-p2p-* --check-for-* --no-check-for-* --rerun-mode --high-priority-stream-groups
    --te-rng-tracker --calculate-per-token-loss --empty-unused-memory-level --batch-invariant-mode
    --enable-ft-* --enable-experimental --config-logger-dir --spec --use-sharp --bucket-* --iterations-*
"""
KEYS |= inert_keys(" ".join((_OF_THE_MODEL, _OF_TRAINING, _OF_PROCESSES)))
FORMAT = Format("Megatron-LM", "arguments of Megatron-LM core 0.15 (megatron/training/arguments.py)", KEYS)
