#!/usr/bin/env bash
# Variants of gpt2-fast-20m and of bench/gpt2-20m-epochs.toml to try on a GPU.
#
#     bench/recipe_variants.sh ROUND DATA [options of recipe_loss.py]
#
# DATA is a directory of GPT-2 tokens. Rounds: refine the recipe, larger models, the test loss of the recipe with three
# seeds, and the same text several times. Choose by the validation loss. A run of the recipe takes about a minute on an
# H200.
set -euo pipefail
cd "$(dirname "$0")/.."
round=$1 data=$2
shift 2

run() {
  python bench/recipe_loss.py "$@"
}

case $round in
  refine)
    run gpt2-fast-20m --data "$data" --no-test "$@" \
      --variant "recipe:" \
      --variant "cooldown 0.9: schedule.cooldown=0.9" \
      --variant "lr 0.018: optim.lr=0.018" \
      --variant "lr 0.035: optim.lr=0.035" \
      --variant "embedding_lr 0.15: optim.embedding_lr=0.15" \
      --variant "decay 0.1 cautious: optim.weight_decay=0.1 optim.cautious_decay=true" \
      --variant "documents: data.documents=mask" \
      --variant "ema: ema.decay=0.98 schedule.min_lr_ratio=0.1"
    ;;
  larger)
    run gpt2-fast-20m --data "$data" --no-test "$@" \
      --variant "w1024: model.embd_size=1024 model.num_heads=8" \
      --variant "w1024, 16 layers: model.embd_size=1024 model.num_heads=8 model.num_layers=16" \
      --variant "w1280: model.embd_size=1280 model.num_heads=10 optim.lr=0.02"
    ;;
  test)
    run gpt2-fast-20m --data "$data" --seeds 0 1 2 "$@"
    ;;
  epochs)
    run bench/gpt2-20m-epochs.toml --data "$data" "$@" \
      --variant "3 passes: train.epochs=3" \
      --variant "6 passes: train.epochs=6" \
      --variant "6 passes, decay 0.5, dropout: train.epochs=6 optim.weight_decay=0.5 model.dropout=0.1"
    ;;
  *)
    echo "expected a round (refine, larger, test or epochs), got $round" >&2
    exit 2
    ;;
esac
