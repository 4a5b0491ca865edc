"""How good a model is: perplexity, multiple-choice tasks, the lm-eval adapter."""
