"""What an engine said, held against the float32 reference of ``models.py``."""

import math
from pathlib import Path

# The variable that tells SGLang where its recorder writes to.
RECORDER_FOLDER = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"

# By method: how close, in log-prob, the two best tokens of the reference may be for the other one to be taken (twice
# what noise moves one of them); and the limit of the mean of |log-prob - reference| over forced tokens. bf16 gives 0.05
# on any engine, an expert of 16 that is left out 1.4.
LIMITS = {None: (0.5, 0.1), "BF16": (0.5, 0.1), "RAWINT4": (0.5, 0.1), "AMXINT8": (1.0, 0.2)}


def wrong_tokens(rows: list[dict], answers: list[dict], method: str | None = "BF16") -> list[str]:
    """Answers that leave the reference where it was sure. What follows a near tie is not compared."""
    wrong, (near_tie, _) = [], LIMITS[method]
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        pairs = zip(row["output_ids"], answer["ids"], row["leads"], strict=True)
        for place, (want, got, lead) in enumerate(pairs):
            if want == got:
                continue
            if lead >= near_tie:
                wrong.append(f"prompt {number}, token {place}: {got}, not {want}, which leads by {lead:.2f}")
            break
    return wrong


def equal_tokens(rows: list[dict], answers: list[dict]) -> int:
    """Tokens that are those of the reference, up to the first of each prompt that is not."""
    count = 0
    for row, answer in zip(rows, answers, strict=True):
        for want, got in zip(row["output_ids"], answer["ids"], strict=True):
            if want != got:
                break
            count += 1
    return count


def forced_errors(rows: list[dict], found: list[list[float]]) -> tuple[float, float]:
    """Mean and largest difference of log-probs; infinite where one is no number."""
    differences = [
        abs(got - want)
        for row, logprobs in zip(rows, found, strict=True)
        for want, got in zip(row["logprobs"], logprobs, strict=True)
    ]
    if not all(map(math.isfinite, differences)):
        return math.inf, math.inf
    return sum(differences) / len(differences), max(differences)


def check_engine(ask, rows: list[dict], method: str | None) -> dict:
    """`ask(call, **arguments)` asks the engine. {"ok", what was found, and "wrong" in words}."""
    greedy = ask("greedy", rows=rows)
    mean, largest = forced_errors(rows, ask("forced", rows=rows))
    wrong, (_, limit) = wrong_tokens(rows, greedy, method), LIMITS[method]
    if not mean < limit:
        wrong.append(f"log-probs differ by {mean:.3f} on average (limit {limit}), at most {largest:.3f}")
    return {
        "ok": not wrong,
        "tokens": sum(len(row["output_ids"]) for row in rows),
        "tokens_equal": equal_tokens(rows, greedy),
        "logprob_mean": round(mean, 4),
        "logprob_largest": round(largest, 4),
        "wrong": wrong,
    }


def check_recorded(ask, rows: list[dict], folder: Path, method: str | None) -> dict:
    """check_engine twice, recorded in `folder`: the second time experts lie where the first left them."""
    import torch

    ask("record_experts", what="start")
    found = [check_engine(ask, rows, method) for _ in range(2)]
    ask("record_experts", what="dump")
    wrong = [line for check in found for line in check["wrong"]]
    files = {
        name: list(folder.glob(f"{name}_*.pt")) for name in ("expert_distribution_recorder", "gpu_expert_distribution")
    }
    wrong += [f"{len(paths)} files {name}" for name, paths in files.items() if len(paths) != 1]
    if not files["gpu_expert_distribution"]:
        return {**found[1], "ok": False, "wrong": wrong}
    masks = torch.load(files["gpu_expert_distribution"][0], weights_only=True)["gpu_expert_masks"]
    if len(masks) < 2 * len(rows):
        wrong.append(f"{len(masks)} passes of at least {2 * len(rows)} are recorded")
    if bool((masks.sum((1, 2)) != masks[:1].sum()).any()):
        wrong.append("passes differ in the number of experts on the GPU")
    if not bool((masks != masks[:1]).any()):
        wrong.append("no expert moved")
    return {**found[1], "ok": not wrong, "wrong": wrong, "passes": len(masks)}


def check_together(ask, rows: list[dict]) -> dict:
    """Prompts at once and one that is cancelled: the others get the tokens they get alone, and the one ends early."""
    most = 2000
    found = ask("together", rows=rows * 2, cancel_after=4, most=most)
    wrong = wrong_tokens(rows * 2, found["answers"])
    cancelled = found["cancelled"]
    if cancelled["finish"] != "abort" or cancelled["tokens"] >= most:
        wrong.append(f"the cancelled request ended with {cancelled['finish']} after {cancelled['tokens']} tokens")
    after = ask("greedy", rows=rows[:1])
    wrong += [f"after the cancel: {line}" for line in wrong_tokens(rows[:1], after)]
    return {"ok": not wrong, "cancelled_after": cancelled["tokens"], "wrong": wrong}
