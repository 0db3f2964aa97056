"""Plans of all ranks: `Values`, which part of each tensor is where; `StrategyPlan`, what ranks run, send and store."""
