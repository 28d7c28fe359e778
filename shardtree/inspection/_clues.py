"""Guesses about a folder or file that isn't a checkpoint, from the names in it or the file's first bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..shell.table import is_save_folder

Clue = tuple[str, str]
"""Likely kind of a folder or file, and the remedy."""

_PICKLES = r".*\.(bin|pt|pth|ckpt|pkl)(\.index\.json)?"
_AS_TENSORS = "; convert the arrays to tensors, and save those."
_SAFER = (
    "save_pretrained(..., safe_serialization=True) writes weights as safetensors. If you trust the file, read it with"
    " torch.load, and store the result with `save`."
)
_PICKLED = ("pickled weights or states, which can run code when they are loaded and are not read", _SAFER)

_ORBAX = (
    r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt",
    "a checkpoint of Orbax (JAX), or a part of one",
    "orbax.checkpoint.StandardCheckpointer().restore(folder) reads the folder with _METADATA. Convert its arrays with"
    " torch.from_dlpack, and store them with `save`.",
)
_TENSORFLOW = (
    r".*\.data-\d{5}-of-\d{5}|saved_model\.pb",
    "a TensorFlow checkpoint or model",
    f"tf.train.load_checkpoint reads its variables{_AS_TENSORS}",
)
_CLUES = (
    (
        r"latest_checkpointed_iteration\.txt",
        "a run of Megatron-LM or verl, without a step that can be opened",
        "Pass the folder of a step, such as iter_0000042; the error then says what it lacks.",
    ),
    (
        r"mp_rank_\d+(_\d+)*",
        "a checkpoint of Megatron-LM from before torch_dist: a pickle for each rank",
        "Convert it to torch_dist with Megatron-LM.",
    ),
    (
        r"__\d+\.metadata",
        "a checkpoint of torch.distributed.checkpoint, saved with use_collectives=False: an index for each rank only",
        "Load it there with as many ranks as saved it, and save it with use_collectives=True.",
    ),
    (
        r".*\.distcp",
        "data files of torch.distributed.checkpoint or Megatron-Core; the save is unfinished, or a file is missing",
        "Load another checkpoint. A whole one has .metadata, and also metadata.json if Megatron-Core saved it.",
    ),
    (
        r"common\.pt",
        "an unfinished save of Megatron-Core, with its common state but without its tensors",
        "Load another checkpoint, such as the previous step.",
    ),
    (
        r".*\.safetensors",
        "several safetensors files without the index that lists the files of a model",
        "Pass one of the files, or download the index, too.",
    ),
    (r"\.zarray|zarr\.json", "a zarr array, or an unfinished save of shardtree", "Pass the array's group."),
    (_PICKLES, *_PICKLED),
)
_GGUF = (
    "a model in llama.cpp's GGUF",
    "transformers' from_pretrained(folder, gguf_file=name) reads many architectures; save_pretrained then writes"
    " safetensors.",
)
_NPZ = (
    "NumPy arrays",
    'safetensors.numpy.save_file(dict(numpy.load(file)), "model.safetensors") makes a file that can be opened.',
)
_NPY = ("a NumPy array", f"numpy.load reads it{_AS_TENSORS}")
_HDF5 = ("arrays in HDF5, as Keras saves weights", f"h5py reads them{_AS_TENSORS}")
_TAR = ("a tar archive", "Unpack it, and open the folder or file of weights in it.")
_OTHERS = (
    (r".*\.gguf", *_GGUF),
    (r".*\.npz", *_NPZ),
    (r".*\.npy", *_NPY),
    (
        r".*\.nemo",
        "a NeMo model, as a tar archive",
        "Unpack it, and open the folder model_weights in it. If it has model_weights.ckpt, use NeMo's restore_from.",
    ),
    (r".*\.msgpack", "weights of Flax", f"flax.serialization.msgpack_restore reads the file's bytes{_AS_TENSORS}"),
    (r".*\.(h5|hdf5)", *_HDF5),
    (r".*\.keras", "a model of Keras", f"keras.saving.load_model reads it{_AS_TENSORS}"),
    (
        r".*\.onnx",
        "a model in ONNX",
        f"onnx.load reads it, and onnx.numpy_helper.to_array each of its graph.initializer{_AS_TENSORS}",
    ),
)
"""Files of other programs in formats that shardtree doesn't read."""

_CONVERSION = re.compile(r"\.convert-[0-9a-f]+")
_UNFINISHED = (
    "a conversion that was interrupted, or is still running",
    "Run the same conversion again; it resumes.",
)
_SAVE = ("a save that was interrupted, or is still running", "Load another checkpoint, or wait until it is finished.")


def is_conversion(name: str) -> bool:
    """Return whether a name is one that `convert` gives to the folder of an unfinished conversion.

    Examples:
        >>> is_conversion(".convert-0123"), is_conversion("convert")
        (True, False)
    """
    return _CONVERSION.fullmatch(name) is not None


def clue(names: Iterable[str]) -> Clue | None:
    """Return the likely kind of a folder or file, and what to do with it; None if none of the names is known.

    Args:
        names: Names in the folder, or the name of the file.

    Examples:
        >>> clue(["config.json", "pytorch_model.bin"])[0]
        'pickled weights or states, which can run code when they are loaded and are not read'
        >>> clue(["notes.txt"]) is None
        True
    """
    names = list(names)
    if any(map(is_conversion, names)):
        return _UNFINISHED
    if any(map(is_save_folder, names)):
        return _SAVE
    return _first((_ORBAX, *_CLUES, _TENSORFLOW, *_OTHERS), names)


def others_clue(names: Iterable[str]) -> Clue | None:
    """Return the likely kind of an Orbax or TensorFlow checkpoint's folder, and what to do with it; None for others.

    Examples:
        >>> others_clue(["d", "manifest.ocdbt"])[0], others_clue(["losses.npy"])
        ('a checkpoint of Orbax (JAX), or a part of one', None)
    """
    return _first((_ORBAX, _TENSORFLOW), list(names))


def _first(rows: Iterable[tuple[str, str, str]], names: list[str]) -> Clue | None:
    for pattern, state, fix in rows:
        if any(re.fullmatch(pattern, name, re.DOTALL) for name in names):
            return state, fix
    return None


# Files without a telling name, such as one in a cache, recognised by their first bytes

HEAD_BYTES = 512
"""Number of bytes that `clue_of_bytes` looks at."""

_HEADS = (
    (rb"GGUF", _GGUF),
    (rb"\x93NUMPY", _NPY),
    (rb"\x89HDF\r\n\x1a\n", _HDF5),
    (rb"PK\x03\x04.{26}[^/]*/data\.pkl|\x80[\x02-\x05]", _PICKLED),
    (rb"PK\x03\x04.{26}.{0,300}\.npy", _NPZ),
    (rb".{257}ustar", _TAR),
    (rb".{5}\0\0\0\{", ("a safetensors file with another suffix", "Rename it so that it ends in .safetensors.")),
)


def clue_of_bytes(head: bytes) -> Clue | None:
    """Return the likely kind of a file by its first bytes, and what to do with it; None if the bytes aren't known.

    Examples:
        >>> clue_of_bytes(b"GGUF and more")[0], clue_of_bytes(b"notes")
        ("a model in llama.cpp's GGUF", None)
    """
    return next((hint for pattern, hint in _HEADS if re.match(pattern, head, re.DOTALL)), None)
