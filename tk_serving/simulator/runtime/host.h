// TileLang's generated host code (argument checks, launch sizes) calls the TVM runtime; here it calls the simulator.
#pragma once
#include "tvm/runtime/c_backend_api.h"

int sim_find(void* library, const char* name, void** function);
int sim_call(void* function, TVMFFIAny* arguments, int count, TVMFFIAny* result);
void sim_set_error(const char* kind, const char* message);

#define TVMBackendGetFuncFromEnv(library, name, function) sim_find(library, name, (void**)(function))
#define TVMFFIFunctionCall(function, arguments, count, result) sim_call(function, arguments, count, result)
#define TVMFFIErrorSetRaisedFromCStr(kind, message) sim_set_error(kind, message)
