"""What XLA compiles, and what a device or a program needs of memory."""

from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util


def compiled_by_xla() -> bool:
    """Whether the function that is being traced will be compiled by XLA.

    XLA leaves assertions out without a word; what relies on one must know.
    """
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())


def device_limit(device: str) -> int:
    """The bytes of a device that TensorFlow may use, for "GPU:0" and the like.

    `get_memory_info` tells what is in use, and nothing public tells of how much.
    """
    for found in device_lib.list_local_devices():
        if found.name.endswith(device):
            return int(found.memory_limit)
    raise ValueError(f"There is no device {device!r}.")


def compiled_bytes(function: Any, *args: Any) -> int:
    """The memory that XLA has assigned to a compiled function beyond its arguments.

    Temporaries, results that do not overwrite an argument, and constants. The compiler
    tells it in the buffer assignment of the program, of which TensorFlow gives the
    serialised form and not the class to read it with. Nothing runs.
    """
    program = hlo_pb2.HloProto()
    compiler = function.experimental_get_compiler_ir(*args)
    program.ParseFromString(compiler(stage="optimized_hlo_proto_serialized"))
    allocations = program.buffer_assignment.buffer_allocations
    return sum(
        a.size
        for a in allocations
        if not (a.is_entry_computation_parameter or a.is_thread_local)
    )
