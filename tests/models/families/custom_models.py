"""Nets of no library: graph nets, flows, recurrent, spiking and convolutional nets."""

from __future__ import annotations

import math
from typing import Any

import entmax
import torch
from snntorch import surrogate
from torch import nn
from torch.nn import functional as F

from tests.models.families.family_registry import family

# --- graphs: nodes, edges (2, number)


def graph(nodes: int, edges: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(nodes, 6), torch.randint(0, nodes, (2, edges))


GRAPHS = ((5, 8), (7, 12))


class GraphConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, edges):
        source, target = edges[0], edges[1]
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(edges.shape[1])) + 1
        scale = degree.rsqrt()
        messages = self.linear(x)[source] * (scale[source] * scale[target]).unsqueeze(1)
        return torch.zeros(x.shape[0], messages.shape[1]).index_add(0, target, messages)


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GraphConvolution(6, 8), GraphConvolution(8, 3)

    def forward(self, x, edges):
        return self.last(F.relu(self.first(x, edges)), edges)


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.score = nn.Linear(16, 1)

    def forward(self, x, edges):
        source, target = edges[0], edges[1]
        hidden = self.linear(x)
        score = F.leaky_relu(self.score(torch.cat([hidden[source], hidden[target]], 1)), 0.2).squeeze(1)
        highest = torch.full((x.shape[0],), -math.inf).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - highest[target]).exp()
        total = torch.zeros(x.shape[0]).scatter_add(0, target, weight)
        weight = (weight / total[target]).unsqueeze(1)
        return torch.zeros_like(hidden).index_add(0, target, weight * hidden[source])


class MessagePassing(nn.Module):
    """Messages from both ends of an edge, averaged, then a GRU cell, as in MPNN."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(12, 8), nn.SiLU(), nn.Linear(8, 6))
        self.update = nn.GRUCell(6, 6)

    def forward(self, x, edges):
        source, target = edges[0], edges[1]
        for _ in range(2):
            messages = self.message(torch.cat([x[source], x[target]], 1))
            index = target.unsqueeze(1).expand_as(messages)
            x = self.update(torch.zeros_like(x).scatter_add(0, index, messages), x)
        return x.sum(0)


for _name, _kind in (("gcn", Gcn), ("gat", Gat), ("mpnn", MessagePassing)):
    family(_name)(lambda kind=_kind: (kind(), [graph(*size) for size in GRAPHS]))


# --- normalising flows


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.cat([moved * scale.exp() + shift, kept], 1), scale.sum(1)


class RealNvp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(), Coupling()])

    def forward(self, x):
        total = torch.zeros(x.shape[0])
        for layer in self.layers:
            x, log_determinant = layer(x)
            total = total + log_determinant
        base = torch.distributions.Normal(torch.zeros(6), torch.ones(6), validate_args=False)
        return -(base.log_prob(x).sum(1) + total).mean()


class Glow(nn.Module):
    """Activation norm, an invertible product and a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])
        self.coupling = Coupling()

    def forward(self, x):
        x = (x * self.scale + self.shift) @ self.weight
        total = self.scale.abs().log().sum() + torch.linalg.slogdet(self.weight)[1]
        x, log_determinant = self.coupling(x)
        return 0.5 * x.square().sum(1).mean() - (total + log_determinant).mean()


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp(), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        hidden = posterior.rsample()
        error = F.mse_loss(self.decoder(hidden), x)
        return error + torch.distributions.kl_divergence(posterior, prior).mean()


class Policy(nn.Module):
    """The loss of an actor-critic step, by torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x, actions, returns):
        hidden = torch.tanh(self.body(x))
        distribution = torch.distributions.Categorical(logits=self.actor(hidden), validate_args=False)
        advantage = returns - self.critic(hidden).squeeze(1)
        loss = -(distribution.log_prob(actions) * advantage.detach()).mean()
        return loss + advantage.square().mean() - 0.01 * distribution.entropy().mean()


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 9)

    def forward(self, x, y):
        logits, mean, spread = self.head(x).chunk(3, 1)
        mixture = torch.distributions.Categorical(logits=logits, validate_args=False)
        parts = torch.distributions.Normal(mean, F.softplus(spread) + 0.1, validate_args=False)
        return -torch.distributions.MixtureSameFamily(mixture, parts, validate_args=False).log_prob(y).mean()


for _name, _kind in (("real_nvp", RealNvp), ("glow", Glow), ("vae", VariationalAutoencoder)):
    family(_name)(lambda kind=_kind: (kind(), [(torch.randn(n, 6),) for n in (4, 5)]))


@family("actor_critic")
def actor_critic() -> Any:
    return Policy(), [(torch.randn(n, 6), torch.randint(0, 4, (n,)), torch.randn(n)) for n in (4, 5)]


@family("mixture_density")
def mixture_density() -> Any:
    return MixtureDensity(), [(torch.randn(n, 6), torch.randn(n)) for n in (4, 5)]


# --- recurrent


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.net = kind(6, 8, **settings)

    def forward(self, x):
        return self.net(x)


RECURRENT = {
    "lstm": (nn.LSTM, {"num_layers": 2, "batch_first": True, "bidirectional": True, "dropout": 0.2}),
    "lstm_proj": (nn.LSTM, {"proj_size": 4}),
    "lstm_proj_both": (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "gru_deep": (nn.GRU, {"num_layers": 2, "batch_first": True, "bias": False}),
    "rnn": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}
for _name, (_kind, _settings) in RECURRENT.items():
    family(_name)(
        lambda kind=_kind, settings=_settings: (
            Recurrent(kind, **settings),
            [(torch.randn(5, 2, 6),), (torch.randn(7, 3, 6),)],
        )
    )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return last


@family(
    "lstm_packed",
    refused="... packs sequences, whose lengths are values inside a tensor, so one graph is not valid for "
    "every input. Give the padded sequences to the recurrent layer, and take each one's last output with "
    "torch.gather",
)
def lstm_packed() -> Any:
    return Packed(), [
        (torch.randn(2, 5, 6), torch.tensor([3, 5])),
        (torch.randn(3, 7, 6), torch.tensor([7, 2, 4])),
    ]


class Seq2Seq(nn.Module):
    """An LSTM encoder, a GRU cell as decoder with additive attention, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(6, 8, batch_first=True), nn.GRUCell(8, 8)
        self.score, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x):
        memory, (state, _) = self.encoder(x)
        state, outputs = state[0], []
        for _ in range(3):
            weights = (memory @ self.score(state).unsqueeze(2)).squeeze(2).softmax(1)
            state = self.decoder((weights.unsqueeze(1) @ memory).squeeze(1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


@family("seq2seq_lstm")
def seq2seq_lstm() -> Any:
    return Seq2Seq(), [(torch.randn(2, 5, 6),), (torch.randn(3, 7, 6),)]


# --- Functions of libraries


class Spiking(nn.Module):
    """Two layers of leaky neurons over four steps, with snntorch's surrogate gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.decay = nn.Parameter(torch.tensor(0.8))
        self._spike = surrogate.fast_sigmoid(slope=25)

    def forward(self, x):
        hidden, membrane = torch.zeros(x.shape[0], 8), torch.zeros(x.shape[0], 3)
        spikes = []
        for _ in range(4):
            hidden = 0.9 * hidden + self.first(x)
            spike = self._spike(hidden - 1.0)
            membrane = self.decay * membrane + self.last(spike)
            spikes.append(self._spike(membrane - 1.0))
            hidden = hidden - spike.detach()
        return torch.stack(spikes), membrane


class Sparse(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self._function = function

    def forward(self, x):
        weights = self._function(self.query(x) @ x.transpose(1, 2), dim=-1)
        return self.head(weights @ x)


@family("snntorch")
def spiking() -> Any:
    return Spiking(), [(torch.randn(n, 6),) for n in (3, 5)]


for _name in ("sparsemax", "entmax15"):
    family(_name)(
        lambda name=_name: (Sparse(getattr(entmax, name)), [(torch.randn(2, n, 6),) for n in (4, 5)])
    )


# --- convolutional and others


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(3, 4, k, padding=k // 2) for k in (1, 3, 5)])
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.norm(torch.cat([branch(x) for branch in self.branches], 1))
        x = F.max_pool2d(F.relu(x), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        skip = F.elu(self.down(x))
        up = self.up(F.elu(self.deep(skip)))
        return self.head(torch.cat([skip, up], 1))


class MobileNetV3Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(3, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, 2, 1, groups=12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.project = nn.Conv2d(12, 6, 1)

    def forward(self, x):
        x = F.hardswish(self.depth(F.hardswish(self.norm(self.expand(x)))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.project(x * gate)


class ShuffleNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, groups=2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        hidden = F.relu(self.norm(self.first(x)))
        batch, _, height, width = hidden.shape
        hidden = hidden.view(batch, 2, 4, height, width).transpose(1, 2).reshape(batch, 8, height, width)
        return F.channel_shuffle(self.last(hidden), 4) + x


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.GroupNorm(1, 4 + 2 * i), nn.Mish(), nn.Conv2d(4 + 2 * i, 2, 3, padding=1))
                for i in range(3)
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return F.avg_pool2d(x, 2)


class TemporalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 8, 3, dilation=1))
        self.last = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 4, 3, dilation=2))

    def forward(self, x):
        x = F.relu(self.first(F.pad(x, (2, 0))))
        return self.last(F.pad(x, (4, 0)))


class VideoNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.max_pool3d(F.relu(self.norm(self.first(x))), 2).mean((2, 3, 4)))


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.sin(30 * self.first(x)))


class DeepFm(nn.Module):
    """A factorisation machine beside an MLP over embedded categories."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.factors = nn.Embedding(30, 1), nn.Embedding(30, 4)
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.PReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("offsets", torch.tensor([0, 10, 20]))

    def forward(self, x, y):
        index = x + self.offsets
        factors = self.factors(index)
        crossed = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True)
        logits = self.first(index).sum(1) + crossed + self.mlp(factors.flatten(1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), y)


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, a, b):
        a, b = F.normalize(self.encoder(a), dim=1), F.normalize(self.encoder(b), dim=1)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(a.shape[0]))


class TransformerPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.net(source, target, tgt_mask=mask, tgt_is_causal=True)


class NeuralOde(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        for _ in range(3):
            first = self.field(x)
            second = self.field(x + 0.05 * first)
            x = x + 0.1 * second
        return x


class Hypernetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.base = nn.Linear(4, 18), nn.Linear(6, 6)

    def forward(self, x, z):
        weight = self.generator(z).view(-1, 3, 6)
        return torch.einsum("boi,bi->bo", weight, torch.relu(self.base(x)))


class SpectralNet(nn.Module):
    """A Fourier layer: complex numbers between two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))
        self.lift = nn.Linear(1, 4)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.lift(x), dim=1)
        spectrum = spectrum * torch.view_as_complex(self.weight)
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1)


def picture(n: int, channels: int = 3, size: int = 8) -> tuple[torch.Tensor]:
    return (torch.randn(n, channels, size, size),)


OTHERS = {
    "inception": (Inception, picture),
    "unet": (UNet, picture),
    "mobilenet_v3": (MobileNetV3Block, picture),
    "shufflenet": (ShuffleNetBlock, lambda n: picture(n, 8)),
    "densenet": (DenseBlock, lambda n: picture(n, 4)),
    "tcn": (TemporalConvolution, lambda n: (torch.randn(2, 6, 5 + n),)),
    "video": (VideoNet, lambda n: (torch.randn(n, 2, 4, 4, 4),)),
    "siren": (Siren, lambda n: (torch.randn(n, 6),)),
    "deepfm": (DeepFm, lambda n: (torch.randint(0, 10, (n, 3)), torch.rand(n))),
    "contrastive": (Contrastive, lambda n: (torch.randn(n, 6), torch.randn(n, 6))),
    "nn_transformer": (TransformerPair, lambda n: (torch.randn(2, n + 2, 16), torch.randn(2, n, 16))),
    "neural_ode": (NeuralOde, lambda n: (torch.randn(n, 6),)),
    "hypernetwork": (Hypernetwork, lambda n: (torch.randn(n, 6), torch.randn(n, 4))),
}
for _name, (_kind, _batch) in OTHERS.items():
    family(_name)(lambda kind=_kind, batch=_batch: (kind(), [batch(n) for n in (3, 4)]))


@family(
    "fourier",
    refused="aten....default at ..., in forward: spectrum = torch.fft.rfft(self.lift(x), dim=1) "
    "computes with complex numbers, which an ONNX graph that is trained cannot hold. Put the complex part of "
    "the model into a torch.autograd.Function, which keeps PyTorch's kernels",
)
def fourier() -> Any:
    return SpectralNet(), [(torch.randn(2, 4 + 2 * n, 1),) for n in (3, 4)]


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return torch.distributions.Normal(self.head(x), 1.0, validate_args=True).log_prob(x)


@family("checked_distribution")
def checked_distribution() -> Any:
    return Checked(), [(torch.randn(n, 6),) for n in (3, 4)]
