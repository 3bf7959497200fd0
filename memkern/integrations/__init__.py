"""Adapters for other frameworks, a module each; importing one needs the framework.

``memkern.integrations.transformers``: the Trainer's ``optimizer_cls_and_kwargs`` and a callback.
``memkern.integrations.timm``: optimizers in timm's registry.

An optimizer's name is that of its class in small letters, everywhere: adamw8bit, lion8bit, lamb8bit, adamw, ...
"""
