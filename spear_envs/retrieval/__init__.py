"""Finding passages: corpora, retrievers with one Protocol, indexes and their builds, and the service.

Independent of tasks. Heavy packages (faiss, ONNX Runtime, torch) are imported when they are used.
"""
