"""The modelling files of this folder, mended as `older_code` mends a checkpoint's own copies, to build models from here."""

from tests.hooks.adapters.remote_code import modeling_tiny_huginn, modeling_tiny_ouro

from visitlens.hooks.adapters.families.huginn import Huginn
from visitlens.hooks.adapters.families.ouro import Ouro

for _module, _family in ((modeling_tiny_huginn, Huginn), (modeling_tiny_ouro, Ouro)):
    for _change in _family.mends:
        _change(_module)

TinyHuginn, TinyOuro = modeling_tiny_huginn.TinyHuginn, modeling_tiny_ouro.TinyOuro
