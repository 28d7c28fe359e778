"""Storage that isn't a local disk: object stores, and whatever fsspec reaches."""

from ._object_url import in_larger_requests, object_storage
