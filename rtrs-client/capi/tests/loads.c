/* Loads librtrs with dlopen, unloads it and loads it again: loads URI LIBRARY. Prints `passed`. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <rtrs.h>

#define CHECK(condition)                                                \
    do {                                                                \
        if (!(condition)) {                                             \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);     \
            exit(1);                                                    \
        }                                                               \
    } while (0)

struct library {
    void *handle;
    int (*open_uri)(const char *, rtrs_volume **);
    int (*get_queue)(rtrs_volume *, uint32_t, rtrs_queue **);
    int (*pwrite)(rtrs_queue *, const void *, size_t, uint64_t);
    int (*free)(rtrs_volume *);
};

static void *find(void *handle, const char *name)
{
    void *found = dlsym(handle, name);
    CHECK(found);
    return found;
}

static struct library load(const char *path)
{
    struct library all = {.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL)};
    CHECK(all.handle);
    *(void **)&all.open_uri = find(all.handle, "rtrs_open_uri");
    *(void **)&all.get_queue = find(all.handle, "rtrs_get_queue");
    *(void **)&all.pwrite = find(all.handle, "rtrs_pwrite");
    *(void **)&all.free = find(all.handle, "rtrs_free");
    return all;
}

/* Uses the library in a thread that then exits, which destroys its thread-local values. */
static void *use_once(void *argument)
{
    char **words = argument;
    rtrs_volume *volume;
    struct library all = load(words[2]);
    CHECK(all.open_uri(words[1], &volume) == 0 && all.free(volume) == 0);
    CHECK(dlclose(all.handle) == 0);
    return NULL;
}

int main(int count, char **words)
{
    static unsigned char block[4096];
    rtrs_volume *volume;
    rtrs_queue *queue;
    pthread_t thread;
    if (count != 3)
        return 2;
    const char *uri = words[1], *path = words[2];
    CHECK(!dlopen(path, RTLD_NOW | RTLD_NOLOAD));
    CHECK(pthread_create(&thread, NULL, use_once, words) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    /* The library stays mapped; otherwise the next volume's threads would lose their code. */
    CHECK(dlopen(path, RTLD_NOW | RTLD_NOLOAD));

    struct library all = load(path);
    CHECK(all.open_uri(uri, &volume) == 0 && all.get_queue(volume, 0, &queue) == 0);
    CHECK(dlclose(all.handle) == 0 && dlclose(all.handle) == 0);
    /* The volume sends heartbeats meanwhile. */
    usleep(500000);

    all = load(path);
    CHECK(all.pwrite(queue, block, sizeof block, 0) == 0 && all.free(volume) == 0);
    CHECK(dlclose(all.handle) == 0);
    puts("passed");
    return 0;
}
