/* Lifetimes of processes with librtrs: process MODE URI [ROUNDS]. Prints `passed`. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rtrs.h>

/* Maximum wait of a call, in milliseconds, and maximum lifetime of a child, in seconds. */
#define LONG 120000
#define CHILD_SECONDS_MAX 600

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, rtrs_error_message()); \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

static unsigned char block[4096];

/* Number of entries in a directory of /proc. */
static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;
    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

/* Number of lines of /proc/self/maps, read without memory of the C library. */
static int count_mappings(void)
{
    static char bytes[65536];
    int count = 0, file = open("/proc/self/maps", O_RDONLY);
    ssize_t len;
    CHECK(file >= 0);
    while ((len = read(file, bytes, sizeof bytes)) > 0)
        for (ssize_t at = 0; at < len; at++)
            count += bytes[at] == '\n';
    CHECK(len == 0 && close(file) == 0);
    return count;
}

struct use {
    int mappings, descriptors, threads;
};

static struct use in_use(void)
{
    return (struct use){count_mappings(), count_entries("/proc/self/fd"),
                        count_entries("/proc/self/task")};
}

/* Waits until the process uses no more than `most`: detached threads of a closed volume
 * exit on their own. */
static void await_use(struct use most)
{
    struct use now = in_use();
    for (int round = 0; round < LONG / 10; round++, now = in_use()) {
        if (now.mappings <= most.mappings && now.descriptors <= most.descriptors &&
            now.threads <= most.threads)
            return;
        usleep(10000);
    }
    fprintf(stderr, "mappings %d, were %d; descriptors %d, were %d; threads %d, were %d\n",
            now.mappings, most.mappings, now.descriptors, most.descriptors, now.threads,
            most.threads);
    exit(1);
}

static void open_and_close(const char *uri, int closes)
{
    rtrs_volume *volume;
    rtrs_queue *queue;
    CHECK(rtrs_open_uri(uri, &volume) == 0);
    CHECK(rtrs_get_queue(volume, 0, &queue) == 0);
    CHECK(rtrs_pwrite(queue, block, sizeof block, 0) == 0);
    if (closes)
        CHECK(rtrs_close(volume, LONG) == 0);
    /* The kernel may take a while to finish the last receives. */
    int freed = -EBUSY;
    for (int round = 0; round < 20 && freed == -EBUSY; round++)
        freed = rtrs_free(volume);
    CHECK(freed == 0);
}

/* Opens and closes a volume many times. Those after the first ten leave nothing behind. */
static void opens(const char *uri, int rounds)
{
    struct use before = in_use(), early = before;
    for (int round = 1; round <= rounds; round++) {
        open_and_close(uri, round % 2);
        if (round == 10) {
            await_use((struct use){INT_MAX, before.descriptors, before.threads});
            early = in_use();
        }
    }
    await_use(early);
}

/* Forks a child that inherits the descriptors of the volume; both wait to be killed. */
static void forks(const char *uri)
{
    rtrs_volume *volume;
    rtrs_queue *queue;
    CHECK(rtrs_open_uri(uri, &volume) == 0 && rtrs_get_queue(volume, 0, &queue) == 0);
    CHECK(rtrs_pwrite(queue, block, sizeof block, 0) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(CHILD_SECONDS_MAX);
        for (;;)
            pause();
    }
    printf("child %d\n", child);
    CHECK(fflush(stdout) == 0);
    alarm(CHILD_SECONDS_MAX);
    for (;;)
        pause();
}

/* Takes over the volume as its writer. */
static void writes(const char *uri)
{
    open_and_close(uri, 1);
}

int main(int count, char **words)
{
    if (count != 3 && count != 4)
        return 2;
    const char *mode = words[1], *uri = words[2];
    if (!strcmp(mode, "opens") && count == 4)
        opens(uri, atoi(words[3]));
    else if (!strcmp(mode, "forks"))
        forks(uri);
    else if (!strcmp(mode, "writes"))
        writes(uri);
    else
        return 2;
    puts("passed");
    return 0;
}
