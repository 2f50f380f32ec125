"""From a checkpoint folder to a Model: strict, tensor by tensor, with about one copy of the weights in
memory.

Read before: `model.py`, `config.py`; used by `generate.py` and the measurements.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from command.config import read_config, read_json
from model import DTYPES, Model, ModelConfig, inverse_frequencies


def shard_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a checkpoint and the tensors promised in each ([] where there is no index)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.is_file():
            raise ValueError(without_weights(folder))
        return {single: []}
    names, shards = read_json(index).get("weight_map"), {}
    if not isinstance(names, dict) or not all(isinstance(file, str) and file for file in names.values()):
        raise ValueError(f"{index} has no weight_map of tensor to file; fetch the checkpoint again")
    for name, file in names.items():
        shards.setdefault(folder / file, []).append(name)
    if single.exists() and single not in shards:
        raise ValueError(
            f"{folder} has two sets of weights, {single.name} and those of {index.name}; remove the older one"
        )
    if missing := sorted(file.name for file in shards if not file.is_file()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{index.name} names {missing[0]}{more}, which is not in {folder}; {fetch_again(folder)}"
        )
    return shards


def without_weights(folder: Path) -> str:
    """What to say of a folder that has no safetensors file and no index of such."""
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]
    advice = f"convert {others[0]} to safetensors" if others else fetch_again(folder)
    shown = ", ".join((others or names)[:8]) or "nothing"
    return f"{folder} has no model.safetensors or index (found: {shown}); {advice}"


def fetch_again(folder: Path) -> str:
    """How to get what a folder lacks: a snapshot in the hub's cache is completed by running again."""
    if folder.parent.name == "snapshots":
        repo = folder.parents[1].name.removeprefix("models--").replace("--", "/")
        return f"the download of {repo} is not complete: run again with a network and without HF_HUB_OFFLINE"
    return "fetch the checkpoint again"


def read_tensors(folder: Path):
    """Yield (name, tensor) over all files; the tensors are memory-mapped and cost nothing until read.

    A mapping counts as used memory while any of its tensors lives.  A few tensors share one, so whoever
    converts as it goes never holds much more than the converted copy.
    """
    for file, promised in shard_files(folder).items():
        try:
            with safe_open(file, "pt") as f:
                names = list(f.keys())
            if missing := set(promised) - set(names):
                raise ValueError(
                    f"{file.name} lacks {min(missing)}, which the index promises; fetch the checkpoint again"
                )
            for i in range(0, len(names), 32):
                with safe_open(file, "pt") as f:
                    for name in names[i : i + 32]:
                        yield name, f.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise ValueError(
                f"{file} is not a readable safetensors file ({e}); fetch the checkpoint again"
            ) from None


def check_tensors(folder: Path, model: Model):
    """Compare every tensor of a checkpoint with the model's parameters, by what the file headers say."""
    missing, kind = dict(model.named_parameters()), model.config.model_type
    known = set(missing)
    for name, tensor in read_tensors(folder):
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} is {tensor.dtype}; allowed are {', '.join(DTYPES)}: choose an unquantized checkpoint"
            )
        if is_spare(name, model.config):
            continue
        want = missing.pop(name, None)
        if want is None and name in known:
            raise ValueError(f"the checkpoint has {name} twice, in several files; fetch it again")
        if want is None:
            raise ValueError(f"the checkpoint has {name}, for which a {kind} of this config has no place")
        if want.shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; config.json asks for {tuple(want.shape)}"
            )
    if missing:
        raise ValueError(
            f"the checkpoint lacks {', '.join(list(missing)[:3])} ({len(missing)} in all); fetch it again"
        )


def is_spare(name: str, config: ModelConfig) -> bool:
    """Tensors that some files carry and no model needs: the copy of a tied head, and old Llama files' angles,
    which follow from rope_theta.
    """
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    return tied or name.endswith("rotary_emb.inv_freq")


def load(folder, config: ModelConfig | None = None, dtype: torch.dtype | None = None, device="cpu") -> Model:
    """Read a checkpoint folder into a Model of `dtype` (None: the checkpoint's own) on `device`; `config` is
    what the folder's config.json says, unless given.

    Strict: every tensor is consumed, every parameter filled, every shape compared, before any is read;
    ValueError names the tensor.  Peak memory is about one copy of the weights: where dtype and device are the
    checkpoint's, the parameters are the mapped file itself.
    """
    folder = Path(folder)
    config = config or read_config(folder)
    if dtype is None and config.dtype not in DTYPES:
        raise ValueError(
            f"config.json has dtype {config.dtype!r}; allowed are {', '.join(DTYPES)}: choose one with dtype"
        )
    dtype, head = dtype or DTYPES[config.dtype], None
    with torch.device("meta"):
        model = Model(config)
    check_tensors(folder, model)
    model.inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
    for name, tensor in read_tensors(folder):
        if is_spare(name, config):
            head = tensor if name == "lm_head.weight" else head
            continue
        module, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
        model.get_submodule(module)._parameters[leaf] = parameter
    embedding = model.model["embed_tokens"].weight
    if head is not None and not torch.equal(head.to(device, dtype), embedding):
        raise ValueError(
            "lm_head.weight differs from the embedding although tie_word_embeddings is true; set it to false"
        )
    return model.eval()
