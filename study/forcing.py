"""Teacher forcing: given tokens fed to an engine, with the steps that it would take, in few passes.

Read before: `sfi.py`; used by `eval.py`.
"""

from command.checks import where_not_finite
from sampling import sound
from sfi import Engine


def force(engine: Engine, b: int, tokens: list[int]):
    """Feed given tokens to row b, as `Engine.step` would one by one, but a run of fast steps in one pass.

    Yields (logits (n, V), n RowSteps), pass by pass.
    """
    if engine.cfg.exact:
        raise ValueError("force feeds given tokens, which exact mode would verify; use decode")
    row, waiting = engine.rows[b], []  # tokens and row steps that wait for their pass
    engine.check_room(b, len(tokens))

    def passed():
        fed, row_steps = zip(*waiting, strict=True)
        waiting.clear()
        engine.passes.clear()
        plan, n = row_steps[-1]._replace(slot=row_steps[0].slot), len(fed)
        fed = row.tokens[-engine.cfg.reread :] if plan.refresh else fed
        logits = engine.run(b, [fed], [plan], n_logits=n)[0]
        if not sound(logits):
            raise ValueError(where_not_finite(engine))
        return logits, row_steps

    for token in tokens:
        if waiting and engine.cfg.policy == "window" and row.since >= engine.cfg.max_interval:
            yield passed()  # before planning the next, which copies from the cache
        plan = engine.plan(b, engine.next_reason(b, token))
        if waiting and (plan.refresh or plan.reason != waiting[-1][1].reason):
            yield passed()
        waiting.append((token, engine.record(row, plan, [token])))
        if plan.refresh:
            yield passed()
    if waiting:
        yield passed()
