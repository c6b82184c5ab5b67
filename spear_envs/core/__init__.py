"""What all environments share: the contract, and everything for writing new ones."""

from spear_envs.core.env import (
    ActionResult,
    CommonKeywords,
    OnMalformed,
    RewardMode,
    SpearEnv,
    image_of,
    text_of,
)
from spear_envs.core.episode import set_training_step
from spear_envs.core.errors import EnvFault, SpearError, UnknownTaskError, choose_member
from spear_envs.core.parsing import (
    MAX_RESPONSE_LENGTH,
    ParsedResponse,
    PlainParser,
    ResponseFormat,
    ResponseParser,
    TagParser,
    make_parser,
)
from spear_envs.core.prompts import (
    IMAGE,
    CompactTemplate,
    DefaultTemplate,
    PromptContext,
    PromptTemplate,
    RunningTemplate,
)
from spear_envs.core.registration import register_env
from spear_envs.core.rewards import REWARD_TERM_KEYS, Criterion, RewardTerms
from spear_envs.core.spaces import INFO_KEYS, PermissiveText, StepInfo
from spear_envs.core.tasks import (
    GeneratedTaskSet,
    ListTaskSet,
    NumberedTaskSet,
    Task,
    TaskSet,
    canonical_json,
    check_disjoint,
    check_split,
)
from spear_envs.core.tools import CallError, CallParser, Tool, make_tool

__all__ = [
    "IMAGE",
    "INFO_KEYS",
    "MAX_RESPONSE_LENGTH",
    "REWARD_TERM_KEYS",
    "ActionResult",
    "CallError",
    "CallParser",
    "CommonKeywords",
    "CompactTemplate",
    "Criterion",
    "DefaultTemplate",
    "EnvFault",
    "GeneratedTaskSet",
    "ListTaskSet",
    "NumberedTaskSet",
    "OnMalformed",
    "ParsedResponse",
    "PermissiveText",
    "PlainParser",
    "PromptContext",
    "PromptTemplate",
    "ResponseFormat",
    "ResponseParser",
    "RewardMode",
    "RewardTerms",
    "RunningTemplate",
    "SpearEnv",
    "SpearError",
    "StepInfo",
    "TagParser",
    "Task",
    "TaskSet",
    "Tool",
    "UnknownTaskError",
    "canonical_json",
    "check_disjoint",
    "check_split",
    "choose_member",
    "image_of",
    "make_parser",
    "make_tool",
    "register_env",
    "set_training_step",
    "text_of",
]
