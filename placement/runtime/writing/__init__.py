"""The code of one rank: `write` makes a `RankCode` of a `StrategyPlan`."""
