"""Judging: what is wrong in a checkpoint is found with its code and place; what is right in it raises no alarm."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from checkpoint_folders import Training, collapsed_scaler, dead, inf_weight, nan_mean, nan_moment, nan_weight, negative_moment, negative_variance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import whynan
from whynan.forensics.checkpoints.judging import judge
from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.findings import Finding, Severity
from whynan.forensics.wishes import Wishes
from whynan.records import TensorStats


def found(state: Any, **wishes: Any) -> list[Finding]:
    """What counts of a state."""
    return list(whynan.check(state, **wishes).findings)


def only(state: Any, **wishes: Any) -> Finding:
    """The one finding of a state."""
    findings = found(state, **wishes)
    assert len(findings) == 1, findings
    return findings[0]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A state after ten steps of a healthy training."""
    return Training().run(10).state()


BROKEN = [
    (nan_weight, "not-finite", "WN601", "model.head.weight"),
    (inf_weight, "not-finite", "WN601", "model.stem.weight"),
    (nan_mean, "not-finite", "WN602", "model.norm.running_mean"),
    (nan_moment, "not-finite", "WN603", "optimizer.state.0.exp_avg"),
    (negative_moment, "negative-second-moment", "WN603", "optimizer.state.1.exp_avg_sq"),
    (negative_variance, "negative-variance", "WN602", "model.norm.running_var"),
    (dead, "all-zero", "", ""),
    (collapsed_scaler, "loss-scale", "WN606", "scaler.scale"),
]


@pytest.mark.parametrize(("damage", "what", "code", "place"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_each_kind_of_damage_is_bad_and_named(trained: dict[str, Any], damage: Any, what: str, code: str, place: str) -> None:
    """One broken thing gives one finding, with its code, at its place."""
    state = copy.deepcopy(trained)
    damage(state)
    finding = only(state)
    assert (finding.severity, finding.what, finding.code, finding.place) == (Severity.BAD, what, code, place)


def test_damage_is_counted(trained: dict[str, Any]) -> None:
    """NaN and both infinities are counted apart."""
    state = copy.deepcopy(trained)
    state["model"]["head.weight"][0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert only(state).message == "1 nan, 1 inf, 1 -inf of 40 values"


class Odd(nn.Module):
    """Healthy things that look like damage: masks, bounds, tokens and heads that start from zero, constant norms."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.PReLU())
        nn.init.zeros_(self.block[1].weight)
        self.head = nn.Linear(8, 5)
        nn.init.zeros_(self.head.weight)
        self.cls_token = nn.Parameter(torch.zeros(1, 4, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 8))
        self.layer_scale = nn.Parameter(torch.full((8, 8), 1e-6))
        self.plane_norm = nn.LayerNorm([4, 4])
        self.register_buffer("causal_mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("half_mask", torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1))
        self.register_buffer("min_val", torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.block(x)
        extra = ((self.cls_token + self.pos_embed)[0] * seen[0, :, :4, 0].T).sum(0) + self.layer_scale @ seen[0, :, 1, 1]
        return self.head(seen.mean((2, 3)) + extra + self.plane_norm(x[0, 0, :4, :4]).mean())


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_alarm_on_a_healthy_training(name: str) -> None:
    """Model, optimizer, scheduler and scaler raise nothing, before the first step and after some."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    owners = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "plateau": plateau, "scaler": torch.amp.GradScaler("cpu")}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        return loss

    assert found({k: v.state_dict() for k, v in owners.items()} | {"epoch": 0, "best_loss": math.inf}) == []
    for _ in range(5):
        batch = torch.randn(4, 3, 8, 8)
        optimizer.step(closure)
        scheduler.step()
    assert found({k: v.state_dict() for k, v in owners.items()} | {"epoch": 1, "best_loss": 0.5}) == []


MODULES = [
    nn.LSTM(4, 8, 2), nn.GRU(4, 8), nn.MultiheadAttention(8, 2), nn.Transformer(16, 2, 1, 1, 32), nn.Embedding(10, 4, padding_idx=0), nn.Bilinear(3, 4, 5),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.optim.swa_utils.AveragedModel(nn.Linear(4, 4)),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_no_alarm_on_fresh_modules(module: nn.Module) -> None:
    """Modules as torch initialises them raise nothing, in float32 and as bfloat16."""
    assert found(module) == []
    assert found({k: v.bfloat16() if v.is_floating_point() else v for k, v in module.state_dict().items()}) == []


def configs() -> list[Any]:
    transformers = pytest.importorskip("transformers", reason="the zoo of models needs transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    sides = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return [
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, bos_token_id=1, eos_token_id=2),
        transformers.BertConfig(**small),
        transformers.T5Config(d_model=32, num_layers=2, d_ff=64, num_heads=2, d_kv=16, vocab_size=100),
        transformers.LlamaConfig(**small, num_key_value_heads=2),
        transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=2),
        transformers.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=32),
        transformers.BartConfig(d_model=32, vocab_size=100, **sides),
        transformers.SwinConfig(embed_dim=24, depths=[1, 1], num_heads=[2, 2], image_size=32, patch_size=2, window_size=4),
        transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100),
    ]


def test_no_alarm_on_models_of_transformers() -> None:
    """Ten architectures, fresh, raise nothing, in float32 and float16."""
    transformers = pytest.importorskip("transformers", reason="the zoo of models needs transformers")
    for config in configs():
        model = transformers.AutoModel.from_config(config)
        assert found(model) == [], type(config).__name__
        assert found(model.half()) == [], type(config).__name__


def test_no_alarm_on_adapters_whose_second_half_starts_from_zero() -> None:
    """LoRA, DoRA, AdaLoRA, IA3 and VeRA as peft makes them raise nothing."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    transformers = pytest.importorskip("transformers", reason="adapters need transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=100, bos_token_id=1, eos_token_id=2)
    where = {"target_modules": ["c_attn"]}
    kinds = [
        peft.LoraConfig(**where, fan_in_fan_out=True),
        peft.LoraConfig(**where, use_dora=True, fan_in_fan_out=True),
        peft.AdaLoraConfig(**where, total_step=10, fan_in_fan_out=True),
        peft.IA3Config(**where, feedforward_modules=[], fan_in_fan_out=True),
        peft.VeraConfig(**where, fan_in_fan_out=True),
    ]
    for kind in kinds:
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), kind)
        assert found(peft.get_peft_model_state_dict(model)) == [], type(kind).__name__


def test_float8_fills_its_range_by_design() -> None:
    """Weights in float8 at the end of their range raise nothing; a NaN among them does."""
    weight = torch.linspace(-448, 448, 64).reshape(8, 8).to(torch.float8_e4m3fn)
    assert found({"w.weight": weight, "w.weight_scale": torch.tensor(2e-3)}) == []
    weight.view(torch.uint8)[0, 0] = 0x7F
    assert only({"w.weight": weight}).code == "WN601"


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", "optimizer.state.0.exp_avg", "norm.running_mean"])
def test_an_infinity_is_not_meant_where_nobody_puts_one(name: str) -> None:
    """-inf beside one other value is a mask only where a mask may be."""
    shape = (4,) if name.endswith("bias") else (4, 4)
    assert only({name: torch.zeros(shape).index_fill(0, torch.tensor([1]), -torch.inf)}).severity is Severity.BAD


def test_a_mask_with_nan_is_bad() -> None:
    """A NaN is never meant."""
    assert only({"attn.mask": torch.tensor([[0.0, math.nan], [-math.inf, 0.0]])}).code == "WN602"


def test_head_room_of_float16_is_said_in_doublings() -> None:
    """A weight within two doublings of 65504 is suspect; the same value in float32 is not."""
    values = torch.tensor([[1.0, 40000.0], [2.0, 3.0]])
    finding = only({"fc.weight": values.half()})
    assert (finding.severity, finding.what) == (Severity.SUSPECT, "no-head-room")
    assert finding.message == "reaches 40000: 0.7 doublings left before float16 ends at 65504"
    assert found({"fc.weight": values}) == []


def test_memory_that_was_never_written_is_told_by_its_size() -> None:
    """Values no weight ever has point to torch.empty; with NaN among them it is bad, once trained it is divergence."""
    garbage = torch.tensor([[1e-40, 3e30], [-2e25, 1e-38]])
    assert (only({"fc.weight": garbage}).severity, only({"fc.weight": garbage}).code) == (Severity.SUSPECT, "WN608")
    garbage[0, 0] = math.nan
    assert (only({"fc.weight": garbage}).severity, only({"fc.weight": garbage}).code) == (Severity.BAD, "WN608")
    assert only({"fc.weight": garbage, "global_step": 100}).code == "WN601"
    assert only({"fc.weight": torch.full((3, 3), 1e-41).mul_(torch.arange(1.0, 10).view(3, 3))}).code == "WN608"


def test_a_trained_weight_out_of_all_measure_diverged() -> None:
    """It is finite, and no weight is that large."""
    weight = torch.randn(4, 4) * 1e20
    assert (only({"fc.weight": weight, "global_step": 100}).what, only({"fc.weight": weight, "global_step": 100}).code) == ("diverged", "WN605")


def test_only_beside_a_first_moment_is_v_a_second_one() -> None:
    """Alone it may be a velocity, which has a sign."""
    velocity = torch.tensor([[-1.0, 2.0], [0.5, 1.0]])
    assert found({"optimizer": {"state": {0: {"v": velocity}}}}) == []
    assert only({"optimizer": {"state": {0: {"m": velocity, "v": velocity}}}}).what == "negative-second-moment"


def test_a_layer_of_zeros_and_a_layer_of_one_value_are_suspect(trained: dict[str, Any]) -> None:
    """A trained weight that is zero or constant is suspect, and the file can still be used."""
    state = copy.deepcopy(trained)
    state["model"]["head.weight"].zero_()
    assert (only(state).severity, only(state).what) == (Severity.SUSPECT, "all-zero")
    state["model"]["head.weight"].fill_(0.01)
    assert (only(state).severity, only(state).what) == (Severity.SUSPECT, "one-value")


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate_proj.weight", "bert.layer.0.attention.self.query.weight", "bert.layer.0.attention.output.dense.weight"]
)
def test_names_that_only_resemble_a_gate_or_a_head_are_suspect_at_zero(name: str) -> None:
    """Also in a bare state dict that does not say how long it was trained."""
    assert only({name: torch.zeros(4, 4), "other.weight": torch.randn(4, 4)}).what == "all-zero"


def test_moments_that_are_zero_after_many_steps_mean_no_gradient() -> None:
    """After one step, LoRA's first half has no gradient by right; after many, all moments zero is suspect."""
    moments = {"state": {0: {"exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(3, 3), "step": torch.tensor(50.0)}}}
    assert only({"optimizer": moments}).what == "no-gradient"
    moments["state"][0]["step"] = torch.tensor(1.0)
    assert found({"optimizer": moments}) == []


def test_weights_without_values_are_what_zero_3_leaves() -> None:
    """Placeholders of shape [0] in place of all weights make a file useless."""
    state = {"a.weight": torch.empty(0), "b.weight": torch.empty(0)}
    assert (only(state).severity, only(state).what) == (Severity.BAD, "no-values")


@pytest.mark.parametrize(
    ("scale", "tracker", "severity"),
    [(0.0, 0, Severity.BAD), (math.nan, 0, Severity.BAD), (math.inf, 0, Severity.BAD), (2.0**-9, 0, Severity.BAD), (0.5, 7, Severity.SUSPECT)],
)
def test_a_collapsed_loss_scale_is_told(scale: float, tracker: int, severity: Severity) -> None:
    """Below one it is bad, unless it has settled there."""
    scaler = torch.amp.GradScaler("cpu").state_dict() | {"scale": scale, "_growth_tracker": tracker}
    assert (only(scaler).severity, only(scaler).code) == (severity, "WN606")
    assert only({"scaler": scaler}).place == "scaler.scale"


def test_a_tensor_called_scale_is_no_loss_scale() -> None:
    """Scales of layers may be anything."""
    assert found({"norm.scale": torch.tensor(0.1), "logit_scale": torch.tensor(0.5)}) == []


def test_counters_below_zero_or_not_finite_are_bad(trained: dict[str, Any]) -> None:
    """A step that is NaN or negative is bad; a scheduler that has not stepped may say -1."""
    assert only({"epoch": -3}).what == "bad-counter"
    assert only({"optimizer": {"state": {0: {"step": torch.tensor(math.nan)}}}}).severity is Severity.BAD
    assert found({"scheduler": {"last_epoch": -1}, "epoch": -1}) == []
    assert only({"norm.num_batches_tracked": torch.tensor(-1)}).what == "bad-counter"
    state = copy.deepcopy(trained)
    state["optimizer"]["param_groups"][0]["lr"] = math.nan
    assert only(state).what == "bad-rate"


def test_counters_that_disagree_are_noted(trained: dict[str, Any]) -> None:
    """Layers that counted other batches are worth a note, not a finding."""
    report = whynan.check({"a.num_batches_tracked": torch.tensor(5), "b.num_batches_tracked": torch.tensor(9)})
    assert report.ok
    assert [f.message for f in report.checked[0].findings] == ["layers disagree: 5 here, 9 in b.num_batches_tracked"]


def test_a_learning_rate_nobody_configured_is_told_with_both_numbers(trained: dict[str, Any]) -> None:
    """The rate a run starts from is compared, not the decayed one of the moment."""
    assert found(trained, expect={"lr": 1e-3}) == []
    finding = only(trained, expect={"lr": 1e-4})
    assert (finding.code, finding.place) == ("WN607", "optimizer.param_groups.0.initial_lr")
    assert finding.message.startswith("the learning rate starts from 0.001, 0.0001 was expected; the rate of the moment is 0.00099")


def test_without_a_base_the_rate_of_the_moment_is_compared() -> None:
    """A plain optimizer stores one rate."""
    state = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).state_dict()
    assert found(state, expect={"lr": 0.1}) == []
    assert only(state, expect={"lr": 1.0}).message == "the learning rate is 0.1, 1 was expected"


def test_the_peak_of_a_rising_schedule_may_be_expected() -> None:
    """OneCycleLR is configured by its peak; where it starts is its own affair."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    assert found(state, expect={"lr": 1e-2}) == []
    assert only(state, expect={"lr": 5e-2}).code == "WN607"


def test_a_scheduler_that_brings_its_own_base_is_told(trained: dict[str, Any]) -> None:
    """An optimizer with the right rate and a loaded scheduler with another one."""
    state = copy.deepcopy(trained)
    state["scheduler"]["base_lrs"] = [0.5]
    assert only(state, expect={"lr": 1e-3}).place == "scheduler.base_lrs.0"


def test_a_rate_above_its_base_was_set_by_something_else(trained: dict[str, Any]) -> None:
    """Schedules lower a rate; one above every base is told."""
    state = copy.deepcopy(trained)
    state["optimizer"]["param_groups"][0]["lr"] = 0.2
    assert "above every rate" in only(state, expect={"lr": 1e-3}).message


def test_what_was_configured_does_not_hide_what_is_used(trained: dict[str, Any]) -> None:
    """A rate in the hyper-parameters is not taken for the optimizer's."""
    state = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).state_dict()
    assert only({"hyper_parameters": {"lr": 1e-4}, "optimizer": state}, expect={"lr": 1e-4}).code == "WN607"


def test_any_stored_number_may_be_expected(trained: dict[str, Any]) -> None:
    """By the end of its dotted name; one that is not stored is noted."""
    assert found(trained, expect={"step": 10, "weight_decay": 0.01, "param_groups.0.eps": 1e-8}) == []
    assert only(trained, expect={"weight_decay": 0.1}).message == "0.01 is stored, 0.1 was expected"
    report = whynan.check(trained, expect={"nowhere": 3})
    assert report.ok and report.checked[0].findings[0].what == "expectation-not-found"


def test_groups_meant_to_be_without_decay_are_right() -> None:
    """A second group with weight decay 0 does not contradict the expectation."""
    first, second = nn.Linear(2, 2), nn.LayerNorm(2)
    groups = [{"params": first.parameters(), "weight_decay": 0.1}, {"params": second.parameters(), "weight_decay": 0.0}]
    assert found(torch.optim.AdamW(groups).state_dict(), expect={"weight_decay": 0.1}) == []


def test_a_loss_that_was_nan_when_it_was_saved_is_suspect() -> None:
    """The stored loss tells; a best loss that is still infinite does not."""
    assert only({"loss": math.nan, "w.weight": torch.randn(3, 3)}).what == "bad-loss"
    assert found({"best_loss": math.inf, "w.weight": torch.randn(3, 3)}) == []


def test_names_that_are_allowed_are_not_looked_at() -> None:
    """--allow takes patterns."""
    state = {"a.weight": torch.tensor([[math.nan, 1.0]]), "b.weight": torch.randn(3, 3)}
    assert found(state, allow=("a.*",)) == []
    assert only(state, allow=("b.*",)).place == "a.weight"


def test_a_pickle_that_would_run_code_is_bad_and_other_notes_are_notes() -> None:
    """The reader's notes are judged."""
    first, second = judge({}, [], ["holds argparse.Namespace, read as plain values", "dangerous: posix.system"], Wishes())
    assert (first.severity, first.message) == (Severity.BAD, "loading it without care would run code: posix.system")
    assert second.severity is Severity.NOTE


def test_what_callbacks_remember_is_no_part_of_the_model() -> None:
    """A best score that is NaN is noted."""
    report = whynan.check({"callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(math.nan)}}, "rng_state": torch.get_rng_state()})
    assert report.ok
    assert [f.severity for f in report.checked[0].findings] == [Severity.NOTE]


def test_the_worst_comes_first(trained: dict[str, Any]) -> None:
    """Bad before suspect before note."""
    state = copy.deepcopy(trained)
    state["model"]["stem.weight"].fill_(0.5)
    state["model"]["head.weight"][0] = math.nan
    assert [f.severity for f in whynan.check(state, expect={"x": 1}).checked[0].findings] == [Severity.BAD, Severity.SUSPECT, Severity.NOTE]


ROLES = {
    "layers.3.mlp.weight": Role.WEIGHT,
    "module.norm.running_var": Role.BUFFER,
    "optimizer.state.model.layers.0.weight.exp_avg_sq": Role.MOMENT,
    "optimizer_states.0.state.3.momentum_buffer": Role.MOMENT,
    "state.12.sum": Role.MOMENT,
    "norm.num_batches_tracked": Role.COUNTER,
    "optimizer.state.0.step": Role.COUNTER,
    "callbacks.EarlyStopping.best_score": Role.ASIDE,
    "cuda_rng_state": Role.ASIDE,
    "loops.fit_loop.epoch_loop.state": Role.ASIDE,
    "model.loops.0.weight": Role.WEIGHT,
    "model.config.random.weight": Role.WEIGHT,
    "state.encoder.weight": Role.WEIGHT,
    "opt_model.decoder.weight": Role.WEIGHT,
    "optimal_transport.weight": Role.WEIGHT,
    "optim_g.state.0.v": Role.MOMENT,
}


@pytest.mark.parametrize("name", ROLES)
def test_names_tell_what_a_tensor_is_for(name: str) -> None:
    """Names as libraries write them."""
    assert role_of(name) is ROLES[name]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.builds(
            TensorStats,
            name=st.sampled_from([*ROLES, "scale", "w", "", "a..b", "\x1b[31m"]),
            dtype=st.sampled_from(["float32", "float16", "int64", "bool", "complex64", "float8_e4m3fn", "quint8", "nonsense"]),
            shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
            nan=st.integers(0, 3),
            posinf=st.integers(0, 3),
            neginf=st.integers(0, 3),
            zeros=st.integers(0, 3),
            min=st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
            max=st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        max_size=6,
    ),
    st.dictionaries(
        st.sampled_from(["lr", "optimizer.param_groups.0.lr", "epoch", "scaler.scale", "scale", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just("text")),
        max_size=5,
    ),
)
def test_whatever_is_stored_is_judged_and_can_be_printed(tensors: list[TensorStats], values: dict[str, Any]) -> None:
    """No statistics and no values make the judge stumble, and a NaN is never passed over in a weight."""
    findings = judge(values, tensors, [], Wishes(expect={"lr": 1.0, "x": 2.0}))
    assert all(str(f) for f in findings)
    hurt = [t for t in tensors if t.nan and t.name == "layers.3.mlp.weight" and t.dtype.startswith("float")]
    assert not hurt or any(f.severity is Severity.BAD and f.place == "layers.3.mlp.weight" for f in findings)


@pytest.mark.parametrize("name", ["quant.step", "optimizer.state.0.step"])
def test_a_tensor_of_several_values_is_no_counter_whatever_its_name(name: str) -> None:
    """A step size per channel is called `step` too."""
    found = judge({}, [TensorStats(name, "float32", (2,), nan=1, min=1.0, max=1.0)], (), Wishes())
    assert [(f.what, f.code) for f in found] == [("not-finite", "WN603" if "optimizer" in name else "WN601")]


@pytest.mark.parametrize(
    ("name", "shape", "meant"),
    [("norm.gamma", (4,), False), ("scale", (4,), False), ("attn.mask", (4,), True), ("logit_bias", (4,), True), ("attn.causal", (4, 4), True)],
)
def test_minus_infinity_beside_one_value_is_meant_only_where_a_mask_can_be(name: str, shape: tuple[int, ...], meant: bool) -> None:
    """A gain of [1, 1, -inf, 1] is damage."""
    found = judge({}, [TensorStats(name, "float32", shape, neginf=1, min=1.0, max=1.0)], (), Wishes())
    assert (found == ()) is meant


def test_a_number_beyond_every_float_is_judged_not_fatal() -> None:
    """Pickles and JSON hold integers of any length."""
    found = judge({"step": 10**400, "epoch": -(10**400)}, [], (), Wishes())
    assert [(f.what, f.message) for f in found] == [("bad-counter", "the counter is inf"), ("bad-counter", "the counter is -inf")]
