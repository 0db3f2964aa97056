"""The text of a script's optimizer, and of its `main`."""

from __future__ import annotations

from baselines.strategies.memory_order import order_of
from placement.exporters.scripts import parts
from placement.runtime.setups.code_text import filled
from placement.runtime.setups.facts import Facts
from placement.exporters.scripts.optimizer_text import optimizer_lines


def main(facts: Facts) -> str:
    strategy = facts.strategy
    if facts.stages is not None:
        prepare = [
            *(
                [
                    "stages = parallelize(model, mesh)",
                    "for stage in stages.values():",
                    "    give_weights(stage, device)",
                ]
                if facts.is_cut
                else ["stages = parallelize(model.to(device), mesh)"]
            ),
            *(["mark_tied(stages)"] if facts.tied else []),
            "trained = [p for stage in stages.values() for p in stage.parameters() if p.requires_grad]",
            "schedule = make_schedule(stages, mesh)",
        ]
        trained, runs = "trained", "schedule"
        if not all(facts.stages.modules):
            trained = '[{"params": trained}]'  # of none, on ranks whose stages have no parameters
        tells = "dist.get_world_size() - 1" if order_of(strategy).devices[-1] else "0"
    else:
        prepare = ["model = parallelize(model.to(device), mesh)"]
        if facts.is_cut:
            prepare = ["model = parallelize(model, mesh)", "give_weights(model, device)"]
        trained, runs, tells = "model.parameters()", "model", "0"
    prepare += optimizer_lines(facts, trained)
    return filled(
        parts.MAIN,
        PROCESSES=str(strategy.devices),
        LAUNCH=facts.launch,
        PREPARE="\n".join(f"    {line}" for line in prepare),
        RUNS=runs,
        TELLS=tells,
        OF=" of its own samples" if facts.dp > 1 and not facts.own_samples else "",
    )
