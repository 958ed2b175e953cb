"""The pages of the WL codes: practices that have no cause code of their own. `whynan explain WL101` prints them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one practice."""

    code: str
    slug: str
    title: str
    text: Callable[[], None]

    @property
    def page(self) -> str:
        """The text of `whynan explain CODE`."""
        return inspect.cleandoc(self.text.__doc__ or "")


_pages: dict[str, Page] = {}


def _page(code: str, slug: str, title: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(text: Callable[[], None]) -> Callable[[], None]:
        _pages[code] = Page(code, slug, title, text)
        return text

    return register


def pages() -> dict[str, Page]:
    """All pages by code."""
    return dict(sorted(_pages.items()))


@_page("WL101", "clipping-before-unscale", "gradients clipped before they are unscaled")
def _clipping_before_unscale() -> None:
    """The gradient norm is limited while the gradients still carry the loss scale.

    What happens
    `scaler.scale(loss).backward()` leaves gradients that are 65536 times too large. `clip_grad_norm_`
    brings that norm down to the limit, and `scaler.step` then divides by the scale.

    Why it does harm
    What is left of the step is 65536 times too small: the model hardly learns, and the limit means
    nothing. When the scale changes, so does the length of the step.

    Example
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    Instead
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    How sure
    High: scale, clip and step stand in one function and no unscale_ between them.

    Not this when
    The gradients are unscaled in a helper that the function calls.
    """


@_page("WL102", "loss-checked-after-backward", "loss checked after backward")
def _loss_checked_after_backward() -> None:
    """The loop asks whether the loss is finite when backward has already run.

    What happens
    `loss.backward()` runs first; only then is `isnan(loss)` asked.

    Why it does harm
    The gradients of every parameter are NaN by then. With accumulation they stay in `.grad` and
    poison the batches that follow, also when this one is skipped.

    Example
        loss.backward()
        if torch.isnan(loss):
            continue

    Instead
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        loss.backward()

    How sure
    Medium: the order is certain; whether the gradients are cleared before the next step is not.

    Not this when
    The check only logs, and zero_grad runs before the next backward.
    """


@_page("WL103", "nan-gradients-zeroed", "nan gradients zeroed and the step taken")
def _nan_gradients_zeroed() -> None:
    """Gradients that are not finite are overwritten with 0 and the optimizer steps.

    What happens
    `p.grad[p.grad.isnan()] = 0`, `p.grad.nan_to_num_()` or `p.grad.zero_()` before `optimizer.step()`.

    Why it does harm
    Momentum and weight decay still move the weights (measured with AdamW: 0.0096 in one step), in a
    direction that no batch asked for; and the cause stays. A run has gone on like this for
    97,902 steps over a model that was already dead.

    Example
        for p in model.parameters():
            p.grad = torch.nan_to_num(p.grad)
        optimizer.step()

    Instead
    Skip the whole step, and look for the birth of the NaN.
        if torch.isfinite(norm):
            optimizer.step()

    How sure
    High: the overwriting stands in the source.

    Not this when
    The step is skipped afterwards in every case.
    """


@_page("WL104", "nan-to-num-as-cure", "nan_to_num as a cure")
def _nan_to_num_as_cure() -> None:
    """A NaN is replaced by 0 where it is seen, not prevented where it is born.

    What happens
    `torch.nan_to_num` on an activation, a score or a loss.

    Why it does harm
    The model is trained as if 0 had been the true value, and the gradient of the hidden operation
    is still NaN: 0 * inf on the way back (see WN502).

    Example
        attention = torch.nan_to_num(torch.softmax(scores, -1))

    Instead
    Guard the input of the operation that makes it.
        scores = torch.where(row_is_empty, 0.0, scores)
        attention = torch.where(row_is_empty, 0.0, torch.softmax(scores, -1))

    How sure
    Medium: it may be data in which NaN means "missing"; then say so with `# whynan: ignore[WL104]`.

    Not this when
    No gradient flows and 0 is what a missing value means.
    """


@_page("WL105", "gradient-norm-ignored", "gradient norm thrown away")
def _gradient_norm_ignored() -> None:
    """clip_grad_norm_ returns the norm, and nobody looks at it.

    What happens
    The clip is called as a statement of its own, and nothing else in the function asks whether the
    gradients are finite.

    Why it does harm
    With an infinite norm the factor is 0 and inf * 0 is NaN; with a NaN norm every gradient becomes
    NaN. The step takes it.

    Example
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    Instead
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()

    How sure
    Low: most runs never see an infinite norm; shown with --min-confidence low.

    Not this when
    A gradient scaler or a guard skips such steps.
    """


@_page("WL106", "gradients-checked-after-clipping", "gradients checked after clipping")
def _gradients_checked_after_clipping() -> None:
    """The gradients are searched for NaN when clipping has already spread it.

    What happens
    `clip_grad_norm_` runs, and then each `p.grad` is asked for NaN.

    Why it does harm
    One NaN makes the norm NaN, and the clip multiplies every gradient by it: the check finds all
    tensors bad and can no longer say which one was.

    Example
        clip_grad_norm_(model.parameters(), 1.0)
        bad = [n for n, p in model.named_parameters() if torch.isnan(p.grad).any()]

    Instead
    Look before the clip, or at the norm that the clip returns.
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            ...

    How sure
    Medium: the order is certain; the check may be meant for something else.

    Not this when
    Only the count matters and not the name.
    """


@_page("WL107", "one-rank-skips", "one rank leaves the step alone")
def _one_rank_skips() -> None:
    """A rank that sees a bad loss continues with the next batch, the others do not.

    What happens
    `if torch.isnan(loss): continue` in a loop whose model is wrapped for several processes.

    Why it does harm
    DistributedDataParallel reduces gradients in backward. The rank that skips never joins, and the
    others wait for it until the timeout.

    Example
        if torch.isnan(loss):
            continue
        loss.backward()

    Instead
    Let all ranks decide together.
        bad = torch.logical_not(torch.isfinite(loss)).float()
        dist.all_reduce(bad)
        if bad > 0:
            continue

    How sure
    Medium: the file sets up several processes and no reduction stands near the check.

    Not this when
    The value checked has been reduced already, so that all ranks see the same.
    """


@_page("WL108", "checkpoint-saved-unchecked", "checkpoint saved unchecked")
def _checkpoint_saved_unchecked() -> None:
    """The training function saves the weights and never asks whether they are finite.

    What happens
    `torch.save` of state dicts in a function that trains, without isfinite anywhere in it.

    Why it does harm
    After the first NaN every save replaces a good checkpoint by a dead one, and every resume starts
    dead.

    Example
        torch.save({"model": model.state_dict()}, "last.pt")

    Instead
        if all(torch.isfinite(v).all() for v in model.state_dict().values() if v.is_floating_point()):
            torch.save({"model": model.state_dict()}, "last.pt")

    How sure
    Medium: the check may stand in a helper.

    Not this when
    A keeper verifies the state before it replaces the last good one.
    """


@_page("WL109", "load-without-weights-only", "torch.load without weights_only")
def _load_without_weights_only() -> None:
    """A checkpoint is loaded with the full unpickler.

    What happens
    `torch.load(path)` without `weights_only=True`.

    Why it does harm
    A pickle can run any code when it is loaded. Since torch 2.6 True is the default; with older
    versions, or with `weights_only=False`, the file is trusted completely.

    Example
        state = torch.load("last.pt")

    Instead
        state = torch.load("last.pt", weights_only=True)

    How sure
    Medium: it depends on the version installed. With weights_only=False written out: low, as it was
    somebody's choice.

    Not this when
    The file never leaves your own machine and holds objects that cannot be loaded otherwise.
    """


@_page("WL110", "average-swallows-nan", "running average that keeps a nan")
def _average_swallows_nan() -> None:
    """A running average takes in whatever comes.

    What happens
    `average = 0.9 * average + 0.1 * value` without a check of the value.

    Why it does harm
    One NaN in is NaN for ever after: a prior, a scale or a target that is dead from then on, while
    the batches are healthy again.

    Example
        self.mean = 0.9 * self.mean + 0.1 * x.mean()

    Instead
        new = x.mean()
        self.mean = torch.where(torch.isfinite(new), 0.9 * self.mean + 0.1 * new, self.mean)

    How sure
    Medium: the value may have been checked before it comes here.

    Not this when
    The average is only printed.
    """


@_page("WL111", "host-sync-in-hot-loop", "check that waits for the device")
def _host_sync_in_hot_loop() -> None:
    """An assert on the values of a tensor in the forward pass or in a loop.

    What happens
    `assert not torch.isnan(x).any()` turns a tensor into a Python bool.

    Why it does harm
    The host waits until the device has caught up, for each call. Measured on an H200: a check of
    every gradient makes a step 1.3 to 1.5 times as long, checks in every module 1.5 times.

    Example
        def forward(self, x):
            assert not torch.isnan(x).any()

    Instead
    Gather one flag on the device and read it late, as whynan's tripwire does: 1.002 times.
        guard = whynan.watch(model, optimizer)

    How sure
    Medium: on the CPU it costs little.

    Not this when
    Python runs with -O, or the check is behind a debugging switch.
    """


@_page("WL112", "graph-cut", "loss replaced by a constant")
def _graph_cut() -> None:
    """In one branch the loss becomes a tensor without a graph.

    What happens
    `loss = torch.zeros_like(loss)` or `loss = torch.tensor(0.0)` where there is nothing to learn.

    Why it does harm
    backward raises because nothing requires a gradient; or, as one term of several, the batch
    silently teaches nothing; and with several processes the parameters of that term are missing
    from the reduction.

    Example
        if variance == 0:
            loss = torch.zeros_like(loss)

    Instead
    Keep the graph, or skip the batch before backward.
        if variance == 0:
            loss = prediction.sum() * 0

    How sure
    High for zeros_like in a branch that asks about the values, medium for other constants.

    Not this when
    The branch is only reached in evaluation.
    """


@_page("WL113", "loss-clamped", "loss cut off from above")
def _loss_clamped() -> None:
    """A clamp limits the loss, and with it the gradient to 0.

    What happens
    `loss = loss.clamp(max=100)`.

    Why it does harm
    Above the bound the slope is exactly 0: the samples that are worst teach nothing. A NaN passes
    the clamp unchanged.

    Example
        loss = torch.clamp(loss, max=100.0)

    Instead
    Limit the gradient, which keeps its direction, or use a loss that grows slower.
        norm = clip_grad_norm_(model.parameters(), 1.0)

    How sure
    High where the bound is a number: it is the derivative of clamp. Medium where the bound is not known.

    Not this when
    The loss is only logged, or the bound is the largest number of a half.
    """


@_page("WL114", "guard-for-all-rows-only", "guard that sees only the case that every row is masked")
def _guard_for_all_rows_only() -> None:
    """The check for a fully masked row asks about the whole tensor.

    What happens
    `if (scores == float("-inf")).all():` before the softmax.

    Why it does harm
    It is true only if every row of every sample is masked. One padded sample among others passes,
    and its softmax is NaN (WN401).

    Example
        if (scores == float("-inf")).all():
            return torch.zeros_like(scores)
        return torch.softmax(scores, dim=-1)

    Instead
        empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = torch.softmax(torch.where(empty, 0.0, scores), dim=-1)
        return torch.where(empty, 0.0, weights)

    How sure
    High in a function with a softmax: `.all()` without a dimension is over everything. Low elsewhere.

    Not this when
    The tensor is a single row.
    """


@_page("WL115", "infinite-norm-not-checked", "gradient norm checked for nan only")
def _infinite_norm_not_checked() -> None:
    """The loop skips a step whose gradient norm is NaN, and lets an infinite one pass.

    What happens
    `norm = clip_grad_norm_(...)` followed by `if torch.isnan(norm)`.

    Why it does harm
    The first bad norm is usually inf. The clip multiplies the gradients by max / inf = 0, and
    inf * 0 is NaN: the weights are dead at that step, and from then on every norm is NaN.

    Example
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if torch.isnan(norm):
            continue

    Instead
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            continue

    How sure
    High: the condition stands in the source, and decides about the step.

    Not this when
    Infinity is asked about elsewhere.
    """


@_page("WL116", "iterative-normalisation", "rows and columns normalised in turn, outside log space")
def _iterative_normalisation() -> None:
    """Sinkhorn's iteration divides by row and column sums of the values themselves.

    What happens
    In a loop, a matrix is divided by its row sums and by its column sums.

    Why it does harm
    The entries are exponentials: past 88 they are inf (11 in half), and a row that underflowed sums
    to 0. Either way the quotient is NaN.

    Example
        for _ in range(20):
            p = p / p.sum(dim=1, keepdim=True)
            p = p / p.sum(dim=0, keepdim=True)

    Instead
        for _ in range(20):
            log_p = log_p - torch.logsumexp(log_p, dim=1, keepdim=True)
            log_p = log_p - torch.logsumexp(log_p, dim=0, keepdim=True)

    How sure
    High without an eps in the sums, for entries that are exponentials.

    Not this when
    The entries are bounded away from 0.
    """


@_page("WL117", "epsilon-on-a-count", "the eps on a count does nothing")
def _epsilon_on_a_count() -> None:
    """A tiny number is added to a count that something is divided by.

    What happens
    `mask.sum() + 1e-8` is meant to keep a mean from 0 / 0 where nothing is selected.

    Why it does harm
    From a count of 1 on it changes nothing: 1 + 1e-8 is 1 in float32. For a count of 0 the sum above
    is multiplied by 1e8: measured, 28 / (0 + 1e-8) is 2.8e9 with a gradient of 1e8. Only a sum that is
    exactly 0 there gives 0. In float16 1e-8 is 0, and the quotient is nan.

    Example
        loss = per_token.sum() / (mask.sum() + 1e-8)

    Instead
        loss = (per_token * mask).sum() / mask.sum().clamp(min=1)

    How sure
    Medium where the sum above does not mention the mask; low where it does: then an empty mask gives 0,
    in float32 and bfloat16.

    Not this when
    The sum above is 0 whenever the count is, and nothing runs in float16: the eps is harmless then.
    """


@_page("WL118", "error-of-normalised-values", "squared error of two values that are each normalised")
def _error_of_normalised_values() -> None:
    """Prediction and target are each brought to mean 0 and spread 1 before their squared error.

    What happens
    `(pred - pred.mean()) / pred.std()` is compared with `(target - target.mean()) / target.std()`, often
    to keep large latents from making a large loss.

    Why it does harm
    It is another objective: scale and offset of the prediction no longer count, so the model is never
    told that its output is ten times too large. And each division is by a spread that can be 0.

    Example
        loss = F.mse_loss((p - p.mean()) / p.std(), (t - t.mean()) / t.std())

    Instead
        mean, std = target.mean(), target.std().clamp_min(1e-6)
        loss = F.mse_loss((pred - mean) / std, (target - mean) / std)

    How sure
    Medium: both sides are divided by a spread of their own, in code that trains.

    Not this when
    Only the shape of the signal is to be learnt; a correlation is meant. Unit vectors (F.normalize on
    both sides) are not reported: that is the cosine.
    """
