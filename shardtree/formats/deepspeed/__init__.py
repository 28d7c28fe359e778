"""DeepSpeed's checkpoints: ZeRO-1, 2 and 3, and its Universal Checkpoint."""

from ._listing import LATEST, LATEST_UNIVERSAL, UNIVERSAL, ZERO, recognize, recognize_universal
