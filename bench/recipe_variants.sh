#!/usr/bin/env bash
# Variants of gpt2-fast-20m and gpt2-20m-epochs to try on a GPU, in rounds of at most ten minutes on an H200.
#
#     bench/recipe_variants.sh ROUND DATA [options of recipe_loss.py]
#
# DATA is a directory of GPT-2 tokens. Rounds: 1 large effects, 2 refine the best of round 1, 3 larger models, test the
# test loss of the choice with three seeds, epochs one run of ten passes, epochs-screen short runs of three passes.
# Edit BEST after each round; choose by the validation loss. The seconds are estimates.
set -euo pipefail
cd "$(dirname "$0")/.."
round=$1 data=$2
shift 2

B16="train.tokens_per_step=16384 optim.momentum_warmup=400 schedule.warmup_steps=20"
B8="train.tokens_per_step=8192 optim.momentum_warmup=800 schedule.warmup_steps=40 optim.lr=0.018"
VN="model.value_embeddings=3 optim.neuron_beta=0.95"
W1024="model.embd_size=1024 model.num_heads=8"
BEST="$B16 model.value_embeddings=6 optim.neuron_beta=0.95"

run() {
  python bench/recipe_loss.py "$@"
}

case $round in
  1) # 45, 50, 55, 57, 70 and 95 s
    run gpt2-fast-20m --data "$data" --no-test "$@" \
      --variant "recipe:" \
      --variant "b16: $B16" \
      --variant "b16-v3: $B16 model.value_embeddings=3" \
      --variant "b16-v3-nor: $B16 $VN" \
      --variant "b8-v3-nor: $B8 $VN" \
      --variant "w1024: $B16 $VN $W1024"
    ;;
  2) # 55 to 60 s each
    run gpt2-fast-20m --data "$data" --no-test "$@" \
      --variant "cooldown 0.9: $BEST schedule.cooldown=0.9" \
      --variant "lr 0.018: $BEST optim.lr=0.018" \
      --variant "lr 0.035: $BEST optim.lr=0.035" \
      --variant "embedding_lr 0.15: $BEST optim.embedding_lr=0.15" \
      --variant "decay 0.1 cautious: $BEST optim.weight_decay=0.1 optim.cautious_decay=true" \
      --variant "documents: $BEST data.documents=mask"
    ;;
  3) # 110, 140, 55 and 55 s
    run gpt2-fast-20m --data "$data" --no-test "$@" \
      --variant "w1024, 16 layers: $BEST $W1024 model.num_layers=16" \
      --variant "w1280: $BEST model.embd_size=1280 model.num_heads=10 optim.lr=0.02" \
      --variant "v1: $BEST model.value_embeddings=1" \
      --variant "ema: $BEST ema.decay=0.98 schedule.min_lr_ratio=0.1"
    ;;
  test) # 3 to 5 minutes
    run gpt2-fast-20m --data "$data" --seeds 0 1 2 "$@" --variant "final: $BEST"
    ;;
  epochs) # 470 s
    run bench/gpt2-20m-epochs.toml --data "$data" "$@" --variant "10 passes: $VN"
    ;;
  epochs-screen) # 140 s each
    run bench/gpt2-20m-epochs.toml --data "$data" --no-test "$@" \
      --variant "3 passes: train.epochs=3" \
      --variant "value embeddings: train.epochs=3 $VN" \
      --variant "decay 1.0: train.epochs=3 $VN optim.weight_decay=1.0" \
      --variant "no dropout: train.epochs=3 $VN model.dropout=0.0"
    ;;
  *)
    echo "expected a round (1, 2, 3, test, epochs or epochs-screen), got $round" >&2
    exit 2
    ;;
esac
