"""Tinsmith: the Tinker fine-tuning API on your own machines.

The public names, each loaded from its module when it is first used, so that `import tinsmith` costs
next to nothing. To publish a name, add it to `_MODULE_OF` and to the imports for type checkers; a
test holds the two together, and `scripts/public-names --write` lists it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would be the heaviest import of this module

if TYPE_CHECKING:
    from tinsmith import auth as auth
    from tinsmith import types as types
    from tinsmith._version import __version__ as __version__
    from tinsmith.as_tinker import as_tinker as as_tinker
    from tinsmith.client.admin import AdminClient as AdminClient
    from tinsmith.client.auth import NoIdentityError as NoIdentityError
    from tinsmith.client.events import on_event as on_event
    from tinsmith.client.futures import APIFuture as APIFuture
    from tinsmith.client.losses.composed import LossTerm as LossTerm
    from tinsmith.client.losses.composed import compose_losses as compose_losses
    from tinsmith.client.losses.custom import GradientLoss as GradientLoss
    from tinsmith.client.losses.graph import LossHandle as LossHandle
    from tinsmith.client.losses.graph import PerDatumLossFn as PerDatumLossFn
    from tinsmith.client.management.checkpoints import DeletionReport as DeletionReport
    from tinsmith.client.management.checkpoints import FailedDeletion as FailedDeletion
    from tinsmith.client.management.sessions import TraceExportError as TraceExportError
    from tinsmith.client.request_options import RequestOptions as RequestOptions
    from tinsmith.client.request_options import Timeout as Timeout
    from tinsmith.client.rest import RestClient as RestClient
    from tinsmith.client.retry import RetryBudget as RetryBudget
    from tinsmith.client.samples.retry_config import RetryConfig as RetryConfig
    from tinsmith.client.samples.stream import AsyncSampleStream as AsyncSampleStream
    from tinsmith.client.samples.stream import SampleStream as SampleStream
    from tinsmith.client.samples.stream_reader import SampleEvent as SampleEvent
    from tinsmith.client.sampling import SamplingClient as SamplingClient
    from tinsmith.client.service import ServiceClient as ServiceClient
    from tinsmith.client.training import TrainingClient as TrainingClient
    from tinsmith.errors import AdapterLostError as AdapterLostError
    from tinsmith.errors import APIConnectionError as APIConnectionError
    from tinsmith.errors import APIError as APIError
    from tinsmith.errors import APIResponseValidationError as APIResponseValidationError
    from tinsmith.errors import APIStatusError as APIStatusError
    from tinsmith.errors import APITimeoutError as APITimeoutError
    from tinsmith.errors import AuthenticationError as AuthenticationError
    from tinsmith.errors import BadRequestError as BadRequestError
    from tinsmith.errors import BaseModelDamagedError as BaseModelDamagedError
    from tinsmith.errors import BaseModelError as BaseModelError
    from tinsmith.errors import BaseModelFormatError as BaseModelFormatError
    from tinsmith.errors import BaseModelNoRoomError as BaseModelNoRoomError
    from tinsmith.errors import BaseModelNotFoundError as BaseModelNotFoundError
    from tinsmith.errors import BaseModelUnavailableError as BaseModelUnavailableError
    from tinsmith.errors import BillingError as BillingError
    from tinsmith.errors import BodyTooLargeError as BodyTooLargeError
    from tinsmith.errors import CertificateError as CertificateError
    from tinsmith.errors import CheckpointDamagedError as CheckpointDamagedError
    from tinsmith.errors import CheckpointError as CheckpointError
    from tinsmith.errors import CheckpointExistsError as CheckpointExistsError
    from tinsmith.errors import CheckpointFormatError as CheckpointFormatError
    from tinsmith.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from tinsmith.errors import CheckpointUnavailableError as CheckpointUnavailableError
    from tinsmith.errors import ClosedError as ClosedError
    from tinsmith.errors import CommandConflictError as CommandConflictError
    from tinsmith.errors import CommandPassedError as CommandPassedError
    from tinsmith.errors import ConflictError as ConflictError
    from tinsmith.errors import DecodeError as DecodeError
    from tinsmith.errors import EngineLostError as EngineLostError
    from tinsmith.errors import ExperimentalWarning as ExperimentalWarning
    from tinsmith.errors import IncompleteResultError as IncompleteResultError
    from tinsmith.errors import InternalServerError as InternalServerError
    from tinsmith.errors import LeaseHeldError as LeaseHeldError
    from tinsmith.errors import LeaseLostError as LeaseLostError
    from tinsmith.errors import LedgerDamagedError as LedgerDamagedError
    from tinsmith.errors import LedgerError as LedgerError
    from tinsmith.errors import LedgerUnavailableError as LedgerUnavailableError
    from tinsmith.errors import LedgerVersionError as LedgerVersionError
    from tinsmith.errors import NoReplicaError as NoReplicaError
    from tinsmith.errors import NotFoundError as NotFoundError
    from tinsmith.errors import PermissionDeniedError as PermissionDeniedError
    from tinsmith.errors import RateLimitError as RateLimitError
    from tinsmith.errors import ReplicaError as ReplicaError
    from tinsmith.errors import RequestErrorCategory as RequestErrorCategory
    from tinsmith.errors import RequestFailedError as RequestFailedError
    from tinsmith.errors import ResultExpiredError as ResultExpiredError
    from tinsmith.errors import ResultGoneError as ResultGoneError
    from tinsmith.errors import ResultRefusedError as ResultRefusedError
    from tinsmith.errors import StorageFullError as StorageFullError
    from tinsmith.errors import TinkerError as TinkerError
    from tinsmith.errors import TinsmithError as TinsmithError
    from tinsmith.errors import TokenizerError as TokenizerError
    from tinsmith.errors import UnknownEntryError as UnknownEntryError
    from tinsmith.errors import UnknownFieldError as UnknownFieldError
    from tinsmith.errors import UnprocessableEntityError as UnprocessableEntityError
    from tinsmith.errors import UnreadableResultError as UnreadableResultError
    from tinsmith.errors import ValidationError as ValidationError
    from tinsmith.types import AdamOptimizerConfig as AdamOptimizerConfig
    from tinsmith.types import AdamParams as AdamParams
    from tinsmith.types import Checkpoint as Checkpoint
    from tinsmith.types import CheckpointType as CheckpointType
    from tinsmith.types import Datum as Datum
    from tinsmith.types import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinsmith.types import DimuonParams as DimuonParams
    from tinsmith.types import DmelChunk as DmelChunk
    from tinsmith.types import EncodedTextChunk as EncodedTextChunk
    from tinsmith.types import ForwardBackwardOutput as ForwardBackwardOutput
    from tinsmith.types import LoraConfig as LoraConfig
    from tinsmith.types import ModelID as ModelID
    from tinsmith.types import ModelInput as ModelInput
    from tinsmith.types import ModelInputChunk as ModelInputChunk
    from tinsmith.types import OptimParams as OptimParams
    from tinsmith.types import OptimStepRequest as OptimStepRequest
    from tinsmith.types import OptimStepResponse as OptimStepResponse
    from tinsmith.types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinsmith.types import PromptProvenanceSpan as PromptProvenanceSpan
    from tinsmith.types import SampledProvenanceSpan as SampledProvenanceSpan
    from tinsmith.types import SampledSequence as SampledSequence
    from tinsmith.types import SampleRequest as SampleRequest
    from tinsmith.types import SampleResponse as SampleResponse
    from tinsmith.types import SamplingParams as SamplingParams
    from tinsmith.types import StopReason as StopReason
    from tinsmith.types import TensorData as TensorData
    from tinsmith.types import TensorDtype as TensorDtype
    from tinsmith.types import TrainingRun as TrainingRun

# Where each public name lives. A module's own name stands for the module itself.
_MODULE_OF = {
    "__version__": "tinsmith._version",
    "types": "tinsmith.types",
    "auth": "tinsmith.auth",
    "as_tinker": "tinsmith.as_tinker",
    "ServiceClient": "tinsmith.client.service",
    "TrainingClient": "tinsmith.client.training",
    "SamplingClient": "tinsmith.client.sampling",
    "RestClient": "tinsmith.client.rest",
    "AdminClient": "tinsmith.client.admin",
    "DeletionReport": "tinsmith.client.management.checkpoints",
    "FailedDeletion": "tinsmith.client.management.checkpoints",
    "TraceExportError": "tinsmith.client.management.sessions",
    "NoIdentityError": "tinsmith.client.auth",
    "APIFuture": "tinsmith.client.futures",
    "LossHandle": "tinsmith.client.losses.graph",
    "PerDatumLossFn": "tinsmith.client.losses.graph",
    "GradientLoss": "tinsmith.client.losses.custom",
    "LossTerm": "tinsmith.client.losses.composed",
    "compose_losses": "tinsmith.client.losses.composed",
    "on_event": "tinsmith.client.events",
    "SampleStream": "tinsmith.client.samples.stream",
    "AsyncSampleStream": "tinsmith.client.samples.stream",
    "SampleEvent": "tinsmith.client.samples.stream_reader",
    "RetryBudget": "tinsmith.client.retry",
    "RetryConfig": "tinsmith.client.samples.retry_config",
    "Timeout": "tinsmith.client.request_options",
    "RequestOptions": "tinsmith.client.request_options",
    "APIConnectionError": "tinsmith.errors",
    "APIError": "tinsmith.errors",
    "APIResponseValidationError": "tinsmith.errors",
    "APIStatusError": "tinsmith.errors",
    "APITimeoutError": "tinsmith.errors",
    "AuthenticationError": "tinsmith.errors",
    "BadRequestError": "tinsmith.errors",
    "BaseModelDamagedError": "tinsmith.errors",
    "BaseModelError": "tinsmith.errors",
    "BaseModelFormatError": "tinsmith.errors",
    "BaseModelNoRoomError": "tinsmith.errors",
    "BaseModelNotFoundError": "tinsmith.errors",
    "BaseModelUnavailableError": "tinsmith.errors",
    "BillingError": "tinsmith.errors",
    "BodyTooLargeError": "tinsmith.errors",
    "CertificateError": "tinsmith.errors",
    "CheckpointDamagedError": "tinsmith.errors",
    "CheckpointError": "tinsmith.errors",
    "CheckpointExistsError": "tinsmith.errors",
    "CheckpointFormatError": "tinsmith.errors",
    "CheckpointNotFoundError": "tinsmith.errors",
    "CheckpointUnavailableError": "tinsmith.errors",
    "ClosedError": "tinsmith.errors",
    "CommandConflictError": "tinsmith.errors",
    "CommandPassedError": "tinsmith.errors",
    "ConflictError": "tinsmith.errors",
    "DecodeError": "tinsmith.errors",
    "EngineLostError": "tinsmith.errors",
    "ReplicaError": "tinsmith.errors",
    "NoReplicaError": "tinsmith.errors",
    "AdapterLostError": "tinsmith.errors",
    "ExperimentalWarning": "tinsmith.errors",
    "IncompleteResultError": "tinsmith.errors",
    "InternalServerError": "tinsmith.errors",
    "LeaseHeldError": "tinsmith.errors",
    "LeaseLostError": "tinsmith.errors",
    "LedgerDamagedError": "tinsmith.errors",
    "LedgerError": "tinsmith.errors",
    "LedgerUnavailableError": "tinsmith.errors",
    "LedgerVersionError": "tinsmith.errors",
    "NotFoundError": "tinsmith.errors",
    "PermissionDeniedError": "tinsmith.errors",
    "RateLimitError": "tinsmith.errors",
    "RequestErrorCategory": "tinsmith.errors",
    "RequestFailedError": "tinsmith.errors",
    "ResultExpiredError": "tinsmith.errors",
    "ResultGoneError": "tinsmith.errors",
    "ResultRefusedError": "tinsmith.errors",
    "StorageFullError": "tinsmith.errors",
    "TinkerError": "tinsmith.errors",
    "TinsmithError": "tinsmith.errors",
    "TokenizerError": "tinsmith.errors",
    "UnknownEntryError": "tinsmith.errors",
    "UnknownFieldError": "tinsmith.errors",
    "UnprocessableEntityError": "tinsmith.errors",
    "UnreadableResultError": "tinsmith.errors",
    "ValidationError": "tinsmith.errors",
    "AdamOptimizerConfig": "tinsmith.types",
    "AdamParams": "tinsmith.types",
    "Checkpoint": "tinsmith.types",
    "CheckpointType": "tinsmith.types",
    "Datum": "tinsmith.types",
    "DimuonOptimizerConfig": "tinsmith.types",
    "DimuonParams": "tinsmith.types",
    "DmelChunk": "tinsmith.types",
    "EncodedTextChunk": "tinsmith.types",
    "ForwardBackwardOutput": "tinsmith.types",
    "LoraConfig": "tinsmith.types",
    "ModelID": "tinsmith.types",
    "ModelInput": "tinsmith.types",
    "ModelInputChunk": "tinsmith.types",
    "OptimParams": "tinsmith.types",
    "OptimStepRequest": "tinsmith.types",
    "OptimStepResponse": "tinsmith.types",
    "ParsedCheckpointTinkerPath": "tinsmith.types",
    "PromptProvenanceSpan": "tinsmith.types",
    "SampledProvenanceSpan": "tinsmith.types",
    "SampledSequence": "tinsmith.types",
    "SampleRequest": "tinsmith.types",
    "SampleResponse": "tinsmith.types",
    "SamplingParams": "tinsmith.types",
    "StopReason": "tinsmith.types",
    "TensorData": "tinsmith.types",
    "TensorDtype": "tinsmith.types",
    "TrainingRun": "tinsmith.types",
}

__all__ = list(_MODULE_OF)


if not TYPE_CHECKING:  # a type checker would take it as leave to use any name

    def __getattr__(name: str) -> object:
        module_name = _MODULE_OF.get(name)
        if module_name is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module = importlib.import_module(module_name)
        value = module if module_name == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value  # the next use finds it without coming here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
