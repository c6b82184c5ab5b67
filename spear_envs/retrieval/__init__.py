"""Finding passages: corpora, retrievers behind one Protocol, indexes and how they are built, and the service.

No environment: it knows nothing of tasks. Heavy packages (faiss, ONNX Runtime, torch) are imported when they are used.
"""
