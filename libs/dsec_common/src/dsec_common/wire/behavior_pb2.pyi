from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BehaviorLog(_message.Message):
    __slots__ = ("sandbox_id", "project", "seq", "source", "time_us", "agent", "agent_id", "action", "status", "latency_ms", "tokens_in", "tokens_out", "attributes", "rollout_id", "stage", "message_id", "cause_id", "traceparent", "input_prompt", "output_text", "reward", "error_code", "detail_shed")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OUT_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    INPUT_PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_SHED_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    project: str
    seq: int
    source: str
    time_us: int
    agent: str
    agent_id: str
    action: str
    status: str
    latency_ms: float
    tokens_in: int
    tokens_out: int
    attributes: _containers.ScalarMap[str, str]
    rollout_id: str
    stage: str
    message_id: str
    cause_id: str
    traceparent: str
    input_prompt: str
    output_text: str
    reward: float
    error_code: str
    detail_shed: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., project: _Optional[str] = ..., seq: _Optional[int] = ..., source: _Optional[str] = ..., time_us: _Optional[int] = ..., agent: _Optional[str] = ..., agent_id: _Optional[str] = ..., action: _Optional[str] = ..., status: _Optional[str] = ..., latency_ms: _Optional[float] = ..., tokens_in: _Optional[int] = ..., tokens_out: _Optional[int] = ..., attributes: _Optional[_Mapping[str, str]] = ..., rollout_id: _Optional[str] = ..., stage: _Optional[str] = ..., message_id: _Optional[str] = ..., cause_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., input_prompt: _Optional[str] = ..., output_text: _Optional[str] = ..., reward: _Optional[float] = ..., error_code: _Optional[str] = ..., detail_shed: _Optional[bool] = ...) -> None: ...
