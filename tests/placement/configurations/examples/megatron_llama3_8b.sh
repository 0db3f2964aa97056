#!/bin/bash
TP=${TP:-2}
CP=1
SEQ=8192

torchrun --nproc_per_node=8 --nnodes=1 --node_rank=0 --master_port=6000 pretrain_gpt.py \
    --use-mcore-models \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --kv-channels 128 --seq-length $SEQ --max-position-embeddings $SEQ \
    --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm \
    --untie-embeddings-and-output-weights --disable-bias-linear \
    --attention-dropout 0.0 --hidden-dropout 0.0 \
    --micro-batch-size 1 --global-batch-size 128 \
    --tensor-model-parallel-size $TP --context-parallel-size $CP --pipeline-model-parallel-size 1 \
    --sequence-parallel --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather \
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion \
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 \
    --train-samples 1953125000 --log-interval 1 2>&1 | tee log.txt
