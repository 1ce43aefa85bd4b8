
from __future__ import annotations
from typing import Any
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._pytree import tree_map
from torch.distributed.tensor import DTensor

def handles(target):
    return target is DTensor.from_local

def handles_method(target, args):
    return target in ("redistribute","to_local","full_tensor") and type(args[0]) is DTensor

def call(op, target, args, kwargs):
    mode = get_proxy_mode()
    oargs,okw=args,kwargs
    args,kwargs=tree_map(lambda x: x.real_obj if type(x).__name__=="FakeScriptObject" else x,(args,kwargs))
    with disable_proxy_modes_tracing():
        if op=="call_function": result=target(*args, **kwargs)
        else: result=getattr(args[0],target)(*args[1:],**kwargs)
    tracer=mode.tracer
    pa,pk=tree_map(tracer.unwrap_proxy,(oargs,okw))
    proxy=tracer.create_proxy(op,target,pa,pk)
    return track_tensor_tree(result,proxy,constant=None,tracer=tracer)
